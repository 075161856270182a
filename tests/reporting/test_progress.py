"""Display of a running run: plain lines, the status line, messages, and the list of algorithms."""

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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Engine(NamedTuple):
    ready: bool


def test_a_terminal_shows_the_same_lines_and_removes_the_status_line_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    metrics, _, _ = simulate(steps=3)
    log, terminal = io.StringIO(), Terminal()
    for out in (log, terminal):
        with Progress(3, file=out, clock=lambda: 0.0) as progress:
            for record in metrics:
                (progress.step if record["step"] else progress.evaluation)(record)
                progress.note("[brackets] stay")
                progress.phase("training")
    shown = terminal.getvalue()
    assert all(line in shown for line in log.getvalue().splitlines())
    assert "step 3/3  training" in shown
    assert shown.endswith("\x1b[2K"), "the status line is erased"


def test_the_status_line_contains_the_state_of_the_step() -> None:
    progress = Progress(10, file=io.StringIO())
    assert progress.status == "step 0/10  starting"
    progress.rollout(3, 8, 60, 64, 1000)
    assert progress.status == "step 0/10  3/8 groups  60/64 slots  1,000 tokens"
    progress.rollout(3, 8, 60, 64, 1000, awaiting=123)
    progress.engines([Engine(True), Engine(False), Engine(True)])
    assert "123 at environments" in progress.status
    assert "1 of 3 engines lost" in progress.status
    progress.phase("training")
    assert "  training  " in progress.status
    for record in simulate(steps=6)[0]:
        (progress.step if record["step"] else progress.evaluation)(record)
    assert progress.status.startswith("step 6/10  between steps")
    assert progress.status.endswith(" left")


def test_failures_are_printed_with_their_step() -> None:
    record = simulate(steps=1)[0][1] | {"reward_failures": 4, "reward_timeouts": 1}
    out = io.StringIO()
    Progress(5, file=out).step(record)
    assert "step 1: reward errors 4, reward timeouts 1" in out.getvalue()


def test_there_is_time_left_until_the_last_step() -> None:
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


def test_what_libraries_warn_of_does_not_stand_between_our_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
