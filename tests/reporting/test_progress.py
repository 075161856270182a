"""What a person sees while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console

from april.algorithms.catalogue import ALGORITHMS, CORRECTIONS
from april.commands.algorithms import print_algorithms
from april.reporting.progress import HEADER_EVERY, Progress
from tests.reporting.conftest import simulate


def test_a_log_gets_one_plain_line_a_step_and_a_header_now_and_then() -> None:
    metrics, _, _ = simulate(steps=30)
    out = io.StringIO()
    with Progress(30, file=out) as progress:
        for record in metrics:
            progress.phase("rollout")
            progress.rollout(3, 8, 60, 64, 1000)
            (progress.step if record["step"] else progress.evaluation)(record)
    text = out.getvalue()
    lines = text.splitlines()
    assert text.isascii()
    assert "\x1b" not in text
    headers = [line for line in lines if "reward" in line and "staleness" in line]
    assert len(lines) == len(metrics) + len(headers)
    assert len(headers) == -(-30 // HEADER_EVERY)
    assert all(len(line) <= 80 for line in lines)


def test_the_live_display_fits_a_terminal_and_shows_where_the_step_stands() -> None:
    metrics, _, _ = simulate(steps=6)
    progress = Progress(10, file=io.StringIO())
    for record in metrics:
        if record["step"]:
            progress.step(record)
        if "eval_reward" in record:
            progress.evaluation(record)
    progress.phase("rollout")
    progress.rollout(3, 8, 60, 64, 1000)
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(progress.render())
    shown = console.export_text()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert len(shown.splitlines()) <= 16
    for piece in ("6/10", "3/8", "60/64", "reward", "held-out", "accuracy"):
        assert piece.replace("/", "") in shown.replace(" ", "").replace("/", ""), piece
    assert "…" not in shown, "nothing is cut"


def test_every_algorithm_and_correction_is_listed_with_settings_and_sources() -> None:
    out = io.StringIO()
    print_algorithms(Console(file=out, width=400))
    text = out.getvalue()
    for name, entry in ALGORITHMS.items():
        own = "\n".join(text[text.index(f"\n{name}  {entry.title} (") :].splitlines()[1:4])
        for piece in (*(f"arXiv {source}" for source in entry.sources), entry.loss, entry.aggregation, entry.note):
            assert piece in own, (name, piece)
    for line in (
        "eps_low 0.2, eps_high 0.28; mean: token-mean; dynamic sampling; overlong filter; soft overlong penalty",
        "eps_low none, eps_high none; mean: constant; KL 0.03 (k1, in the reward)",
        "value head: GAE with gamma 1, lambda 0.95",
        "correction_cap 2, correction_low 0, correction_high none",
        "correction_tau 0.04",
    ):
        assert line in text
    assert all(f"\n{name}\n    {rule.summary}" in text for name, rule in CORRECTIONS.items())
