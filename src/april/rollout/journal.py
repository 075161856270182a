"""What survives a crash: everything that happens to the rollouts, as a log that can be gone through again.

A checkpoint is the whole state of a run at one moment. The journal is what happened since: groups admitted, tokens
sampled, rewards given, groups turned away, steps handed to training. A run that died goes on from its newest checkpoint
and goes through the journal again, so that it stands where it died, less what was not written yet.

Tokens that policy versions sampled after the checkpoint are kept, although the weights of those versions died with the
process: the weights go back to the checkpoint, and the steps handed to training since are handed over again, the same
groups with the same tokens in the same order, so that training makes the same versions once more. Nothing is sampled
twice for that, the version of every token stays true, and the run ends as one that never died. What was in flight goes
on from its last written token.

Invariants:
- events are numbered 1, 2, 3, ... without a gap, and what is on disk is always the beginning of what happened: a crash
  loses at most the events of the last `flush_seconds` seconds;
- every record carries a checksum over itself and its numbers; one that is damaged is an error that names it, and no
  record behind it is used;
- a step is handed to training only once that is on disk, and a saved state is never ahead of the journal;
- recording never waits for the disk: one thread writes, and `drain` holds up whoever records too fast.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from april.rollout.engine import Chunk
from april.rollout.events import Event, Trained
from april.rollout.journal_file import DamageError, JournalError, ask, decoded, identity, open_file, record_after
from april.rollout.records import Record, encode

BACKLOG = 1 << 20
"""Events and tokens that may wait to be written before `drain` waits for the disk."""


class Journal:
    """The journal in the SQLite file `path`, made if it is missing. One process at a time has it open.

    Args:
        flush_seconds: longest time in seconds before an event is on disk; 0 writes every event before generation
            continues.

    Attributes:
        run: names the run; a saved state belongs to the journal of its own run only.
        position: the number of the last event that is part of the state.

    Raises:
        DamageError: the file is no journal, or is damaged.
        JournalError: it comes from a newer april, or is open in another process.
        ValueError: `flush_seconds` is negative.
    """

    def __init__(self, path: Path, flush_seconds: float = 1.0) -> None:
        if flush_seconds < 0:
            raise ValueError(
                f"journal_flush_seconds = {flush_seconds}: must be seconds, or 0 to write everything at once"
            )
        self.path = path
        self.flush_seconds = flush_seconds
        self._database = open_file(path)
        self._access = threading.Lock()
        self.run, self.start = identity(path, self._database)
        self.position = 0
        self.last = self._last()
        self._changed = threading.Condition()
        self._pending: list[Event] = []
        self.backlog = 0
        self._urgent = self._closing = False
        self._waiting: list[Future[None]] = []
        self._failure: Exception | None = None
        self._writer: threading.Thread | None = None

    def _last(self) -> int:
        (number,) = ask(self.path, self._database, "SELECT max(number) FROM records")
        return max(self.start, number or 0)

    @property
    def mark(self) -> dict[str, Any]:
        """Where a state that is saved now stands, as JSON types; `seek` goes there."""
        return {"run": self.run, "position": self.position}

    def seek(self, mark: Mapping[str, Any] | None) -> None:
        """Go to a saved state's place; `replay` then gives what happened after it. None is a state without a journal.

        Raises:
            DamageError: the journal is not the state's own, or does not reach from there to its end.
        """
        run, position = (self.run, 0) if mark is None else (mark["run"], mark["position"])
        if run != self.run:
            raise DamageError(f"{self.path}: not the journal that belongs to the saved state, which names run {run}")
        if not self.start <= position <= self.last:
            raise DamageError(
                f"{self.path}: holds events {self.start + 1} to {self.last}, but the saved state stands at {position}"
            )
        self.position = position

    def unread(self) -> None:
        """Return to before the event that `replay` returned last."""
        self.position -= 1

    def replay(self) -> Iterator[Event]:
        """What happened after `position`, which goes along.

        Raises:
            DamageError: a record is damaged, or missing; the message names it.
        """
        while self.position < self.last:
            with self._access:
                record = record_after(self.path, self._database, self.position)
            for number, event in enumerate(decoded(self.path, record), record[1]):
                if number > self.position:
                    self.position = number
                    yield event

    def check(self) -> int:
        """Read everything after `position` once, without going there, and count the steps that were handed over.

        Raises:
            DamageError: a record is damaged, or missing; the message names it.
        """
        position = self.position
        try:
            return sum(isinstance(event, Trained) for event in self.replay())
        finally:
            self.position = position

    def record(self, *events: Event) -> None:
        """Something has happened. It is written by another thread; `drain`, `flush` and `close` say if that failed."""
        assert self.position >= self.last or self._writer, "what happened before has to happen again first"
        if not events:
            return
        backlog = sum([1 + len(event.token_ids) if isinstance(event, Chunk) else 1 for event in events])
        with self._changed:
            idle = not self._pending
            self.position += len(events)
            self._pending += events
            self.backlog += backlog
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
                self._writer.start()
            elif idle:
                self._changed.notify_all()

    async def drain(self) -> None:
        """Wait while too much waits to be written.

        Raises:
            JournalError: the disk is full, or fails otherwise; or an event cannot be encoded.
        """
        most = BACKLOG if self.flush_seconds else 0
        while self._failure is None and self.backlog > most:
            written: Future[None] = Future()
            with self._changed:
                if self._failure is not None or self.backlog <= most:
                    break  # the writer has just been through, and nobody would wake who waits now
                self._waiting.append(written)
                self._urgent = True
                self._changed.notify_all()
            await asyncio.wrap_future(written)
        self._check()

    def flush(self) -> None:
        """Wait until everything that happened is on disk.

        Raises:
            JournalError: the disk is full, or fails otherwise; or an event cannot be encoded.
        """
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.backlog or self._failure is not None)
        self._check()

    def _check(self) -> None:
        if self._failure is None:
            return
        what = f"{self.path}: cannot be written: {type(self._failure).__name__}: {self._failure}; nothing that was "
        if isinstance(self._failure, OSError | sqlite3.Error):
            raise JournalError(f"{what}written before is lost: make room, then go on with the run")
        raise JournalError(f"{what}written before is lost, and the disk is not at fault: an event is not JSON types")

    def prune(self, position: int) -> None:
        """Let go of the events up to `position`: no state before it is kept.

        Raises:
            JournalError: the disk is full, or fails otherwise; or an event cannot be encoded.
        """
        try:
            self._forget(position)
        except sqlite3.Error as error:
            self._failure = error
            self._check()
        self.start = position

    def _forget(self, position: int) -> None:
        with self._access, self._database as transaction:
            transaction.execute("BEGIN IMMEDIATE")
            transaction.execute("DELETE FROM records WHERE number <= ?", (position,))
            transaction.execute("UPDATE run SET start = ?", (position,))

    def close(self) -> None:
        """Write what is left, and let go of the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        self._database.close()

    def _write(self) -> None:
        """Run the writer thread: write events after `flush_seconds`, or at once if a caller waits for them."""
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                self._changed.wait_for(lambda: self._urgent or self._closing, self.flush_seconds or None)
                events, self._pending = self._pending, []
                written, weight, self._urgent = self.position, self.backlog, False
            try:
                self.commit(list(encode(events, written - len(events) + 1)))
            except Exception as error:  # whoever records hears of it; a thread that dies would leave it waiting
                self._failure = error
            with self._changed:
                self.last = written
                self.backlog = 0 if self._failure else self.backlog - weight
                waiting, self._waiting = self._waiting, []
                self._changed.notify_all()
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    def commit(self, records: Sequence[Record]) -> None:
        with self._access, self._database as transaction:
            transaction.execute("BEGIN IMMEDIATE")
            transaction.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", records)
