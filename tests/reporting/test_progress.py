"""The display of a running run."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from april.algorithms.catalogue import ALGORITHMS, CORRECTIONS
from april.commands.algorithms import print_algorithms
from april.reporting.messages import messages
from april.reporting.progress import HEADER_EVERY, Progress
from tests.reporting.conftest import simulate


def test_a_log_gets_one_plain_line_per_step_and_a_periodic_header() -> None:
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


def test_the_live_display_fits_a_terminal_and_shows_the_state_of_the_step() -> None:
    metrics, _, _ = simulate(steps=6)
    progress = Progress(10, file=io.StringIO())
    for record in metrics:
        if record["step"]:
            progress.step(record)
        if "eval_reward" in record:
            progress.evaluation(record)
    progress.phase("rollout")
    progress.rollout(3, 8, 60, 64, 1000)
    shown = displayed(progress)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert len(shown.splitlines()) <= 16
    for piece in ("6/10", "3/8", "60/64", "reward", "held-out", "accuracy"):
        assert piece.replace("/", "") in shown.replace(" ", "").replace("/", ""), piece
    assert "…" not in shown, "nothing is cut"
    progress.rollout(3, 8, 60, 64, 1000, awaiting=123)
    waiting = displayed(progress)
    assert "123 at environments" in waiting
    assert "…" not in waiting
    assert len(waiting.splitlines()) == len(shown.splitlines())


def displayed(progress: Progress) -> str:
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(progress.render())
    return console.export_text()


class Engine(NamedTuple):
    name: str
    place: str
    ready: bool = True
    running: int = 3
    slots: int = 8
    reason: str = ""


def test_engines_are_shown_by_machine_with_lost_engines_first() -> None:
    progress = Progress(10, file=io.StringIO())
    engines = [Engine(f"engine-{i}", f"10.0.0.{i // 2}") for i in range(4)]
    progress.engines(engines)
    engines.append(Engine("engine-4", "10.0.0.9", ready=False, reason="no answer to a heartbeat in 8 s"))
    lines = lines_of(progress)
    assert any("4 of 5 ready on 2 nodes" in line for line in lines)
    assert any("10.0.0.1" in line and "2 engines" in line and "6/16 slots" in line for line in lines)
    lost, first = (next(i for i, line in enumerate(lines) if name in line) for name in ("engine-4", "10.0.0.0"))
    assert lost < first
    assert "no answer to a heartbeat in 8 s" in lines[lost]
    engines += [Engine(f"more-{i}", f"10.0.1.{i:02}") for i in range(62)]
    many = lines_of(progress)
    assert any("and 58 more" in line for line in many)
    assert len(many) <= 27
    assert all(len(line) <= 80 for line in many)


def lines_of(progress: Progress) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(progress.render())
    return console.export_text().splitlines()


def test_failures_are_shown_during_the_run() -> None:
    """204 rewards that failed are no detail."""
    record = simulate(steps=1)[0][1] | {"reward_failures": 4, "reward_timeouts": 1}
    out = io.StringIO()
    log, screen = Progress(5, file=out), Progress(5, file=io.StringIO())
    for progress in (log, screen):
        progress.step(record, {"reward errors": 204, "reward timeouts": 1})
    assert "step 1: reward errors 4, reward timeouts 1" in out.getvalue()
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(screen.render())
    assert "reward errors 204, reward timeouts 1" in console.export_text()


def test_the_remaining_time_is_estimated_until_the_last_step() -> None:
    """After the first of three steps, and however long the second one takes."""
    now = 10.0
    progress = Progress(3, file=io.StringIO(), clock=lambda: now)
    assert progress.time_left is None
    now = 16.0
    progress.step({"step": 1, "seconds": 6.0, "rollout_seconds": 4.0, "train_seconds": 1.0})
    assert progress.time_left == 10.0
    now = 30.0
    assert progress.time_left == 5.0
    progress.step({"step": 2, "seconds": 20.0, "rollout_seconds": 13.0, "train_seconds": 1.0})
    progress.step({"step": 3, "seconds": 25.0, "rollout_seconds": 4.0, "train_seconds": 1.0})
    assert progress.time_left == 0.0


def test_warnings_of_libraries_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with messages(said.append, tmp_path / "run"):
        warnings.warn("this will change", FutureWarning, stacklevel=1)
        (tmp_path / "run").mkdir()
        logging.getLogger("somebody.else").warning("a shard")
        logging.getLogger("april.training").warning("update %s is skipped", 3)
    assert said == ["warning: update 3 is skipped"]
    log = (tmp_path / "run" / "library.log").read_text()
    assert "this will change" in log
    assert "a shard" in log
    assert "skipped" not in log
    assert "".join(capsys.readouterr()) == ""


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
        "correction_delta 0.2",
    ):
        assert line in text
    assert all(f"\n{name}\n    {rule.summary}" in text for name, rule in CORRECTIONS.items())
