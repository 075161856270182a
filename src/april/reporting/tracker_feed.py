"""Keeps one tracker up to date with `metrics.jsonl`, in a thread of its own.

Invariants:
- no tracker ends or delays a run, regardless of its exceptions and latency;
- a tracker gets each record once and in order; records that it could not take are sent later, by a resumed run too;
- `trackers/NAME.json` in the run directory stores the records that a tracker has received, so a resumed run sends
  nothing twice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from april.reporting.metrics import plotted
from april.reporting.metrics_log import FILE_NAME
from april.reporting.trackers import BEFORE_ALL, TRACKERS, Ending, Position, TrackedRun, Tracker, check_trackers

log = logging.getLogger(__name__)

DIRECTORY = "trackers"
FIRST_DELAY, LONGEST_DELAY = 5.0, 300.0
"""Seconds before a tracker that failed is tried again; doubled with each failure in a row."""
SLOW_SECONDS = 60.0
"""Duration after which a call that does not return is reported."""
END_SECONDS = 30.0
"""Time limit of a tracker at the end of a run."""
MOST_TABLES = 64
"""Maximum number of tables that wait for a tracker; `completions/` contains all of them."""


class Feed:
    """Feeds one tracker. Begins at once.

    Args:
        name: name in `TRACKERS`.
        run: description of the run, without the feed's own state.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name = name
        self._state_file = run.directory / DIRECTORY / f"{name}.json"
        self._metrics_file = run.directory / FILE_NAME
        self._run = _remembered(run, self._state_file)
        self._tracker: Tracker | None = None
        self._offset = 0
        """Bytes of `metrics.jsonl` that were sent, or need not be."""
        self._read: Position = BEFORE_ALL
        """The record that ends there."""
        self._tabled = -1
        """Tables up to this step were sent before the run was resumed."""
        self._tables: deque[tuple[int, Sequence[Mapping[str, Any]]]] = deque(maxlen=MOST_TABLES)
        self._changed = threading.Condition()
        self._news = True
        self._ending: Ending | None = None
        self._busy_since: float | None = None
        self._told = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Notify the feed of a new record in `metrics.jsonl`."""
        with self._changed:
            self._news = True
            self._changed.notify_all()
        # Checked by the caller, because the feed's own thread is the one that hangs.
        began = self._busy_since
        if began is not None and time.monotonic() - began > SLOW_SECONDS:
            self._tell(f"has not answered for {SLOW_SECONDS:.0f} s")

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Completions of `step`, a recorded one."""
        with self._changed:
            self._tables.append((step, rows))
            self._news = True
            self._changed.notify_all()

    def end(self, ending: Ending) -> None:
        """Send the remaining records and close the tracker; see `join`."""
        with self._changed:
            self._ending = ending
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the tracker has ended, for a limited time."""
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._tell(f"has not ended within {END_SECONDS:.0f} s")

    def _work(self) -> None:
        delay = 0.0
        while True:
            ending = self._wait(delay)
            self._busy_since = time.monotonic()
            try:
                self._catch_up()
                if ending is not None and self._tracker is not None:
                    self._tracker.close(ending)
                delay = 0.0
            except BaseException as error:  # any error of a tracker's package
                self._tell(f"{type(error).__name__}: {error}".partition("\n")[0])
                self._give_up()
                delay = min(max(FIRST_DELAY, 2 * delay), LONGEST_DELAY)
            self._busy_since = None
            if ending is not None:
                return

    def _wait(self, delay: float) -> Ending | None:
        """Wait for news, or after a failure for `delay` seconds, or for the end, which is returned."""
        with self._changed:
            if delay:
                self._changed.wait_for(lambda: self._ending is not None, delay)
            else:
                self._changed.wait_for(lambda: self._news or self._ending is not None)
            self._news = False
            return self._ending

    def _catch_up(self) -> None:
        if self._tracker is None:
            self._start()
        assert self._tracker is not None
        for offset, at, record in self._records():
            if at > self._run.sent:
                self._tracker.log(at[0], plotted(record))
                self._remember(at)
            self._offset, self._read = offset, at
        while self._tables:
            step, rows = self._tables[0]
            if step > self._tabled:
                self._tracker.table(step, rows)
            # Removed once it was taken, so that a failure keeps it for the next attempt.
            self._tables.popleft()

    def _start(self) -> None:
        """Make the tracker, which gets every record again if the run that it had before is gone."""
        tracker = self._tracker = TRACKERS[self.name][0](self._run)
        sent = self._run.sent if tracker.run_id == self._run.run_id else BEFORE_ALL
        self._run = replace(self._run, run_id=tracker.run_id, moved_from=None)
        self._remember(sent)
        if tracker.position is not None:
            self._remember(tracker.position)
        # At the start only: after a failure, tables of steps that were sent already still wait.
        if not self._offset:
            self._tabled = self._run.sent[0]
        self._offset, self._read = 0, BEFORE_ALL

    def _give_up(self) -> None:
        """Let go of a tracker that has failed; the next attempt makes another."""
        tracker, self._tracker = self._tracker, None
        try:
            if tracker is not None:
                tracker.close("stopped")
        except BaseException as error:  # as above
            log.debug("tracker %s: %s", self.name, error)

    def _records(self) -> Iterator[tuple[int, Position, dict[str, Any]]]:
        """Whole records from `_offset` on: the byte behind each, its position, the record."""
        step, number = self._read
        end = self._offset
        with self._metrics_file.open("rb") as file:
            file.seek(end)
            for line in file:
                # The line is being written; a notification follows.
                if not line.endswith(b"\n"):
                    return
                record = json.loads(line)
                end += len(line)
                step, number = record["step"], number + 1 if record["step"] == step else 1
                yield end, (step, number), record

    def _remember(self, sent: Position) -> None:
        self._run = replace(self._run, sent=sent)
        self._state_file.parent.mkdir(exist_ok=True)
        fresh = self._state_file.with_suffix(".new")
        state = {"run_id": self._run.run_id, "sent": sent, "directory": str(self._run.directory.resolve())}
        fresh.write_text(json.dumps(state), encoding="utf-8")
        fresh.replace(self._state_file)

    def _tell(self, why: str) -> None:
        """Report a failure of the tracker once; later retries are silent."""
        if not self._told:
            self._told = True
            log.warning(
                "tracker %s: %s. The run goes on, and the tracker is tried again; metrics.jsonl has every step",
                self.name,
                why,
            )


def _remembered(run: TrackedRun, state_file: Path) -> TrackedRun:
    """Return the run with the state that an earlier feed saved; without readable state, the run unchanged."""
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        step, number = state["sent"]
        before = Path(state["directory"])
        moved = before if before != run.directory.resolve() else None
        return replace(run, run_id=str(state["run_id"]), sent=(int(step), int(number)), moved_from=moved)
    except (OSError, ValueError, KeyError, TypeError):
        return run


def start_feeds(names: Sequence[str], run: TrackedRun) -> list[Feed]:
    """Feeds of the named trackers.

    Raises:
        ValueError, ModuleNotFoundError: a tracker cannot be used; see `check_trackers`.
    """
    check_trackers(names)
    return [Feed(name, run) for name in names]


def end_feeds(feeds: Sequence[Feed], ending: Ending) -> None:
    """End them together."""
    for feed in feeds:
        feed.end(ending)
    for feed in feeds:
        feed.join()
