"""No tracker ends a run or holds it up, and each gets every record once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from april.reporting import tracker_feed
from april.reporting.run_log import RunLog
from april.reporting.trackers import TRACKERS, Names, TrackedRun
from tests.forked import wait_until
from tests.reporting.test_completions import decode, step_of

JSON = "json"
"""A package that is installed."""


class Server:
    """Where the tracker of these tests sends to, and what becomes of its calls."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, float]] = []
        self.tables: list[int] = []
        self.endings: list[str] = []
        self.runs = 0
        self.failures: Iterator[BaseException | None] = iter(())
        self.hangs = threading.Event()
        self.hangs.set()

    def call(self) -> None:
        self.hangs.wait()
        if (error := next(self.failures, None)) is not None:
            raise error

    def tracker(self, run: TrackedRun) -> Any:
        server = self

        class Remote:
            position = None

            def __init__(self) -> None:
                server.call()
                server.runs += run.run_id is None
                self.run_id = run.run_id or f"run {server.runs}"

            def log(self, step: int, numbers: Mapping[str, float]) -> None:
                server.call()
                server.records.append((self.run_id, step, numbers.get("optimisation/loss", -1.0)))

            def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
                server.call()
                server.tables.append(step)

            def close(self, ending: str) -> None:
                server.endings.append(ending)

        return Remote()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    monkeypatch.setitem(TRACKERS, "remote", (made.tracker, JSON, "remote"))  # type: ignore[arg-type]
    monkeypatch.setattr(tracker_feed, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(tracker_feed, "LONGEST_DELAY", 0.02)
    yield made
    made.hangs.set()


def run(directory: Path, losses: Sequence[float], first: int = 1, **others: Any) -> dict[str, Any]:
    """Steps from `first` on; the state after step 1."""
    state: dict[str, Any] = {}
    with RunLog(directory, {}, ["remote"], decode=decode, **others) as log:
        for number, loss in enumerate(losses, first):
            log.step(step_of(number + 1), {"loss": loss}, slots=2)
            state = state or log.state_dict()
    return state


@pytest.mark.parametrize(
    "failures",
    [
        [OSError("no route to host")] * 4,
        [None, None, OSError("connection reset"), SystemExit(1), KeyboardInterrupt(), None],
        [None, ValueError("Invalid metric name")],
    ],
    ids=["at the start", "in mid-run", "a refusal"],
)
def test_an_outage_of_a_tracker_is_reported_once_and_its_records_are_sent_later(
    failures: list[BaseException | None], server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.failures = iter(failures)
    with RunLog(tmp_path / "run", {}, ["remote"]) as log:
        for number in (1, 2, 3):
            log.step(step_of(number + 1), {"loss": float(number)}, slots=2)
        wait_until(lambda: len(server.records) == 3)
    assert [(step, loss) for _, step, loss in server.records] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("tracker remote: ")
    assert "The run goes on" in warnings[0]


def test_a_hanging_tracker_delays_no_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_feed, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(tracker_feed, "END_SECONDS", 0.1)
    server.hangs.clear()
    state = run(tmp_path / "run", [1.0, 2.0])  # without a limit for the tracker, this would never return
    assert server.records == []
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    monkeypatch.undo()
    monkeypatch.setitem(TRACKERS, "remote", (Server.tracker.__get__(fresh := Server()), JSON, "remote"))
    run(tmp_path / "run", [2.0], 2, resume=True, state=state)
    assert [(step, loss) for _, step, loss in fresh.records] == [(1, 1.0), (2, 2.0)], "it gets what it lacked"


def test_a_run_that_dies_twice_is_sent_once(server: Server, tmp_path: Path) -> None:
    state = run(tmp_path / "run", [1.0, 2.0, 3.0])
    run(tmp_path / "run", [8.0], 2, resume=True, state=state)
    run(tmp_path / "run", [9.0, 9.0, 4.0], 2, resume=True, state=state)
    assert server.records == [("run 1", 1, 1.0), ("run 1", 2, 2.0), ("run 1", 3, 3.0), ("run 1", 4, 4.0)]
    assert server.tables == [1, 2, 3, 4]
    run(tmp_path / "other" / "run", [5.0])
    assert server.records[-1] == ("run 2", 1, 5.0), "a new run of the same name is another one"


def test_a_tracker_gets_the_outcome_of_the_run(server: Server, tmp_path: Path) -> None:
    with RunLog(tmp_path / "finished", {}, ["remote"]) as log:
        log.step(step_of(2), {}, slots=2)
        log.finish()
    run(tmp_path / "stopped", [1.0])
    with pytest.raises(RuntimeError), RunLog(tmp_path / "failed", {}, ["remote"]):
        raise RuntimeError
    with pytest.raises(KeyboardInterrupt), RunLog(tmp_path / "given up", {}, ["remote"]):
        raise KeyboardInterrupt
    assert server.endings == ["finished", "stopped", "failed", "stopped"]


def test_names_are_converted_by_one_rule_and_stay_distinct() -> None:
    names = Names(r"\w.\- :/", longest=12)
    assert [names[name] for name in ("pass@1", "pass_1", "pass#1")] == ["pass_1", "pass_1_2", "pass_1_3"]
    assert names["pass@1"] == "pass_1"
    assert [names[name] for name in ("a//b", "../b", "reward/x.y:z")] == ["a/_/b", "_/b", "reward/x.y:z"]
    assert {len(names[letter * 20]) for letter in "ab"} == {12}
    assert names["b" * 21] == "b" * 10 + "_2"
