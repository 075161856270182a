"""What a person sees while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console

from april.reporting.listing import print_algorithms
from april.reporting.progress import HEADER_EVERY, Progress
from tests.reporting.conftest import simulate


def test_a_log_gets_one_plain_line_a_step_and_a_header_now_and_then() -> None:
    metrics, _, _ = simulate(steps=30)
    out = io.StringIO()
    with Progress(30, file=out) as progress:
        for record in metrics:
            progress.phase("rollout")
            progress.rollout(3, 8, 60, 64, 1000)
            progress.step(record)
    text = out.getvalue()
    lines = text.splitlines()
    assert text.isascii()
    assert "\x1b" not in text
    headers = [line for line in lines if "reward" in line and "accuracy" in line]
    assert len(lines) == len(metrics) + len(headers)
    assert len(headers) == -(-len(metrics) // HEADER_EVERY)
    assert all(len(line) <= 120 for line in lines)


def test_the_live_display_fits_a_terminal_and_shows_where_the_step_stands() -> None:
    metrics, _, _ = simulate(steps=6)
    progress = Progress(10, file=io.StringIO())
    for record in metrics:
        progress.step(record)
    progress.phase("rollout")
    progress.rollout(3, 8, 60, 64, 1000)
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    console.print(progress.render())
    shown = console.export_text()
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert len(shown.splitlines()) <= 16
    for piece in ("6/10", "3/8", "60/64", "reward", "accuracy"):
        assert piece.replace("/", "") in shown.replace(" ", "").replace("/", ""), piece


def test_every_algorithm_and_correction_is_listed() -> None:
    out = io.StringIO()
    print_algorithms(Console(file=out, width=100))
    text = out.getvalue()
    for name in ("grpo", "dapo", "gspo_token", "cispo", "decoupled", "icepop", "2503.14476"):
        assert name in text
