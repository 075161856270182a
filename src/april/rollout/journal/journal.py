"""Journal of the rollouts: every event on disk, so that a run that died resumes where it died.

A checkpoint is the whole state of a run at one moment. The journal holds the events since: groups admitted, tokens
sampled, rewards given, groups rejected, steps handed to training, weight updates. A resumed run loads its newest
checkpoint and replays the journal. Only events that were not written yet are lost.

Tokens that policy versions sampled after the checkpoint are kept, although the weights of those versions died with the
process: the weights go back to the checkpoint, and the steps since are handed to training again, the same groups with
the same tokens in the same order, so that training makes the same versions once more. Nothing is sampled twice, the
version of every token stays true, and the run ends as a run that never died. Unfinished samples resume from their last
written token.

Invariants:
- events are numbered 1, 2, 3, ... without a gap, and the events on disk are always a prefix of the events that
  happened: a crash loses at most the events of the last `flush_seconds`;
- every record carries a checksum; a damaged record is an error that names it, and no record behind it is used;
- a step is handed to training only once it is on disk, and a saved state is never ahead of the journal;
- recording never waits for the disk: one thread writes, and `drain` is the back-pressure.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from april.rollout.engine import Chunk
from april.rollout.events import Event, Trained
from april.rollout.journal.journal_file import DamageError, JournalError, JournalFile, Place
from april.rollout.journal.records import TOKEN_BYTES, Record, chunk_bytes, decode, encode

BACKLOG = 1 << 20
"""Events and tokens that may wait to be written before `drain` waits for the disk."""


class Journal:
    """The journal in the directory `path`, which is made if it is missing. One process at a time has it open.

    Args:
        flush_seconds: longest time in seconds before an event is on disk; 0 writes every event before generation
            continues.

    Attributes:
        position: number of the last event that is part of the state.
        last: number of the last event that is on disk.

    Raises:
        DamageError: the path is no journal, or the journal is damaged.
        JournalError: another process has the journal open, or a newer april has written it.
        ValueError: `flush_seconds` is negative.
    """

    def __init__(self, path: Path, flush_seconds: float = 1.0) -> None:
        if flush_seconds < 0:
            raise ValueError(
                f"journal_flush_seconds = {flush_seconds}: must be seconds, or 0 to write everything at once"
            )
        self.path = path
        self.flush_seconds = flush_seconds
        self._file = JournalFile(path)
        self.position = 0
        self.last = self._file.last
        self._read_last: Place | None = None
        """Place of the record that was read last."""
        self._changed = threading.Condition()
        self._pending: list[Event] = []
        self.backlog = 0
        self._urgent = self._closing = self._new_segment = False
        self._waiting: list[Future[None]] = []
        self._failure: Exception | None = None
        self._writer: threading.Thread | None = None

    def mark(self) -> dict[str, Any]:
        """Return the place of a state that is saved now, as JSON types; `seek` goes there.

        Waits until every event is on disk. The next event begins a segment, so that events before the mark can be
        pruned.

        Raises:
            JournalError: the disk is full or fails, or an event cannot be encoded.
        """
        self.flush()
        self._new_segment = True
        return {"run": self._file.run, "position": self.position}

    def seek(self, mark: Mapping[str, Any] | None) -> None:
        """Go to the place of a saved state; `replay` yields the events after it. None is a state without a journal.

        Raises:
            DamageError: the journal belongs to another run, or does not reach from the place to its end.
        """
        run, position = (self._file.run, 0) if mark is None else (mark["run"], mark["position"])
        if run != self._file.run:
            raise DamageError(f"{self.path}: not the journal that belongs to the saved state, which names run {run}")
        if not self._file.start <= position <= self.last:
            raise DamageError(
                f"{self.path}: holds events {self._file.start + 1} to {self.last}, but the saved state stands at "
                f"{position}"
            )
        self.position = position

    def unread(self) -> None:
        """Return the event that `replay` yielded last to the journal: the next `replay` yields it again."""
        self.position -= 1

    def replay(self) -> Iterator[Event]:
        """Yield the events after `position`, and advance `position` with each.

        Raises:
            DamageError: a record is damaged, or missing; the message names it.
        """
        for record, place in self._file.read(self.position, self._read_last):
            self._read_last = place
            try:
                events = decode(record)
            except ValueError as error:
                raise DamageError(
                    f"{place.segment}: the record of event {record.first} cannot be read: {error}"
                ) from None
            for number, event in enumerate(events, record.first):
                # A record holds many chunks, and may begin before the position.
                if number > self.position:
                    self.position = number
                    yield event

    def check(self) -> int:
        """Read every event after `position`, and return the number of steps among them. `position` stays.

        Raises:
            DamageError: a record is damaged, or missing; the message names it.
        """
        position = self.position
        try:
            return sum(isinstance(event, Trained) for event in self.replay())
        finally:
            self.position = position

    def record(self, *events: Event) -> None:
        """Record events. Another thread writes them; `drain` and `flush` raise its error."""
        assert self.position >= self.last or self._writer, "events on disk have to be replayed first"
        if not events:
            return
        backlog = sum([_weight(event) if isinstance(event, Chunk) else 1 for event in events])
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
        """Wait while more than `BACKLOG` waits to be written.

        Raises:
            JournalError: the disk is full or fails, or an event cannot be encoded.
        """
        most = BACKLOG if self.flush_seconds else 0
        while self._failure is None and self.backlog > most:
            written: Future[None] = Future()
            with self._changed:
                if self._failure is not None or self.backlog <= most:
                    break  # the writer has just finished a batch, and would not wake a future that is added now
                self._waiting.append(written)
                self._urgent = True
                self._changed.notify_all()
            await asyncio.wrap_future(written)
        self._check()

    def flush(self) -> None:
        """Wait until every event is on disk.

        Raises:
            JournalError: the disk is full or fails, or an event cannot be encoded.
        """
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.backlog or self._failure is not None)
        self._check()

    def _check(self) -> None:
        if self._failure is None:
            return
        problem = f"{self.path}: cannot be written: {type(self._failure).__name__}: {self._failure}; "
        if isinstance(self._failure, OSError):
            raise JournalError(f"{problem}everything written before is kept: make room, then resume the run")
        raise JournalError(
            f"{problem}everything written before is kept; the disk works, but an event is not JSON types"
        )

    def prune(self, position: int) -> None:
        """Remove events up to `position`, in whole segments: no state before it is kept.

        Raises:
            JournalError: the disk fails.
        """
        try:
            self.remove(position)
        except OSError as error:
            self._failure = error
            self._check()

    def remove(self, position: int) -> None:
        self._file.prune(position)

    def close(self) -> None:
        """Write every event that waits, and close the files."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        self._file.close()

    def _write(self) -> None:
        """Run the writer thread: write events after `flush_seconds`, or at once if a caller waits for them."""
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                # With 0 seconds, `drain` requests each write and no timer is needed.
                self._changed.wait_for(lambda: self._urgent or self._closing, self.flush_seconds or None)
                # Taken under the lock, and written outside it: `record` never waits for the disk.
                events, self._pending = self._pending, []
                written, weight, self._urgent = self.position, self.backlog, False
            try:
                self.commit(list(encode(events, written - len(events) + 1)))
            except Exception as error:  # `drain` and `flush` raise it; a dead thread would leave them waiting
                self._failure = error
            with self._changed:
                self.last = written
                # Events recorded during the commit are still waiting, so only the weight of this commit is subtracted.
                self.backlog = 0 if self._failure else self.backlog - weight
                waiting, self._waiting = self._waiting, []
                self._changed.notify_all()
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    def commit(self, records: Sequence[Record]) -> None:
        new_segment, self._new_segment = self._new_segment, False
        self._file.append(records, new_segment)


def _weight(chunk: Chunk) -> int:
    """Return how much of the backlog a chunk is; routes count as the tokens that take as much memory."""
    return 1 + chunk_bytes(chunk) // TOKEN_BYTES
