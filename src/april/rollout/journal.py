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
  loses at most the events of the last `delay` seconds;
- every record carries a checksum over itself and its numbers; one that is damaged is an error that names it, and no
  record behind it is used;
- a step is handed to training only once that is on disk, and a saved state is never ahead of the journal;
- recording never waits for the disk: one thread writes, and `room` holds up whoever records too fast.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import threading
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from april.rollout.buffer import Buffer, Rejection
from april.rollout.disk import free_name, sync_directory, sync_file
from april.rollout.engine import Chunk
from april.rollout.step import Step
from april.rollout.trajectory import FinishReason, Group

FORMAT = 1
UPGRADES: dict[int, str] = {}
"""The SQL that makes a journal of one format one of the next, by the format it starts from."""
APPLICATION = 0x4150524C
"""What marks an SQLite file as a journal: "APRL"."""
BACKLOG = 1 << 20
"""Events and tokens that may wait to be written before `room` waits for the disk."""
SCHEMA = """
CREATE TABLE run (id TEXT NOT NULL, start INTEGER NOT NULL);
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    first INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
"""
"""A record holds the events `first` to `number`: several for chunks, one for everything else. `body` is JSON, token ids
are 32-bit integers and log-probabilities 64-bit floats, both little-endian. The events up to `start` were pruned."""


class JournalError(Exception):
    """A journal that cannot be written, or not by this process."""


class DamageError(JournalError):
    """A journal that a saved state cannot go on with as it is; `salvage` makes one of what is whole in it."""


class Admitted(NamedTuple):
    """A group was begun: itself as `Group.to_dict` gives it, and the state of the prompt stream behind it, if any."""

    group: Mapping[str, Any]
    prompts: Mapping[str, Any] | None


class Rewarded(NamedTuple):
    """Samples of a group were scored: reward by index."""

    group_id: int
    rewards: Mapping[int, float]


class Rejected(NamedTuple):
    """A group was turned away."""

    group_id: int
    reason: Rejection


class Trained(NamedTuple):
    """A step was handed to training: the ids of its groups, and its account."""

    group_ids: Sequence[int]
    step: Step


Event: TypeAlias = Admitted | Chunk | Rewarded | Rejected | Trained
"""What can happen to the rollouts. A `Chunk` counts once its tokens are appended."""


def redo(event: Event, buffer: Buffer) -> None:
    """Let `event` happen to `buffer` again."""
    match event:
        case Admitted(group):
            buffer.admit(Group.from_dict(group))
        case Chunk(sample_id, token_ids, logprobs, version, finish):
            group_id, index = map(int, sample_id.split("."))
            buffer.groups[group_id].samples[index].extend(token_ids, logprobs, version, finish)
            buffer.sampled_tokens += len(token_ids)
        case Rewarded(group_id, rewards):
            for index, reward in rewards.items():
                buffer.groups[group_id].samples[index].reward = reward
        case Rejected(group_id, reason):
            buffer.reject(buffer.groups[group_id], reason)
        case Trained(group_ids, step):
            step.groups = [buffer.groups[id] for id in group_ids]
            buffer.train(step.groups)


class Journal:
    """The journal in the SQLite file `path`, made if it is missing. One process at a time has it open.

    Args:
        delay: seconds after which what happened is on disk at the latest; 0 writes everything before generation goes
            on.

    Attributes:
        run: names the run; a saved state belongs to the journal of its own run only.
        position: the number of the last event that is part of the state.

    Raises:
        DamageError: the file is no journal, or is damaged.
        JournalError: it comes from a newer april, or is open in another process.
        ValueError: `delay` is negative.
    """

    def __init__(self, path: Path, delay: float = 1.0) -> None:
        if delay < 0:
            raise ValueError(f"journal_delay = {delay}: must be seconds, or 0 to write everything at once")
        self.path = path
        self.delay = delay
        self._database = _open(path)
        self._access = threading.Lock()
        self.run, self.start = _identity(path, self._database)
        self.position = 0
        self.last = self._last()
        self._changed = threading.Condition()
        self._pending: list[Event] = []
        self._weight = 0
        self._hurry = self._closing = False
        self._waiting: list[Future[None]] = []
        self._failure: str | None = None
        self._writer: threading.Thread | None = None

    def _last(self) -> int:
        (number,) = _ask(self.path, self._database, "SELECT max(number) FROM records")
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

    def replay(self) -> Iterator[Event]:
        """What happened after `position`, which goes along.

        Raises:
            DamageError: a record is damaged, or missing; the message names it.
        """
        while self.position < self.last:
            with self._access:
                record = _record_after(self.path, self._database, self.position)
            for number, event in enumerate(_events(self.path, record), record[1]):
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

    def record(self, event: Event) -> None:
        """Something has happened. It is written by another thread; `room`, `flush` and `close` say if that failed."""
        assert self.position >= self.last or self._writer, "what happened before has to happen again first"
        with self._changed:
            self.position += 1
            self._pending.append(event)
            self._weight += 1 + (len(event.token_ids) if isinstance(event, Chunk) else 0)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
                self._writer.start()
            elif len(self._pending) == 1:
                self._changed.notify_all()

    async def room(self) -> None:
        """Wait while too much waits to be written.

        Raises:
            JournalError: the disk is full, or fails otherwise.
        """
        while self._failure is None and self._weight > (BACKLOG if self.delay else 0):
            written: Future[None] = Future()
            with self._changed:
                self._waiting.append(written)
                self._hurry = True
                self._changed.notify_all()
            await asyncio.wrap_future(written)
        self._check()

    def flush(self) -> None:
        """Wait until everything that happened is on disk.

        Raises:
            JournalError: the disk is full, or fails otherwise.
        """
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._weight or self._failure is not None)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalError(
                f"{self.path}: cannot be written: {self._failure}; nothing that was written before is lost: make room, "
                "then go on with the run"
            )

    def prune(self, position: int) -> None:
        """Let go of the events up to `position`: no state before it is kept.

        Raises:
            JournalError: the disk is full, or fails otherwise.
        """
        try:
            self._forget(position)
        except sqlite3.Error as error:
            self._failure = f"{type(error).__name__}: {error}"
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
        """The writer's thread: what happened goes to disk `delay` seconds later, at once if someone waits for it."""
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                self._changed.wait_for(lambda: self._hurry or self._closing, self.delay or None)
                events, self._pending = self._pending, []
                written, weight, self._hurry = self.position, self._weight, False
            try:
                self._commit(list(_records(events, written - len(events) + 1)))
            except Exception as error:  # whoever records hears of it; a thread that dies would leave it waiting
                self._failure = f"{type(error).__name__}: {error}"
            with self._changed:
                self.last = written
                self._weight = 0 if self._failure else self._weight - weight
                waiting, self._waiting = self._waiting, []
                self._changed.notify_all()
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    def _commit(self, records: Sequence[Record]) -> None:
        with self._access, self._database as transaction:
            transaction.execute("BEGIN IMMEDIATE")
            transaction.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", records)


Record: TypeAlias = tuple[int, int, str, str, bytes, bytes, int]
"""A row of the table `records`."""


def _records(events: Iterable[Event], first: int) -> Iterator[Record]:
    """The events, numbered from `first`, as records: chunks that follow one another share one."""
    for several, run in groupby(events, lambda event: isinstance(event, Chunk)):
        if several:
            chunks: list[Any] = list(run)
            yield _chunk_record(chunks, first)
            first += len(chunks)
        else:
            for event in run:
                yield _sealed(first, first, type(event).__name__.lower(), _body(event))
                first += 1


def _chunk_record(chunks: Sequence[Chunk], first: int) -> Record:
    body = [[c.sample_id, c.version, len(c.token_ids), c.finish] for c in chunks]
    token_ids = np.array([token for c in chunks for token in c.token_ids], dtype="<i4")
    logprobs = np.array([logprob for c in chunks for logprob in c.logprobs], dtype="<f8")
    last = first + len(chunks) - 1
    return _sealed(last, first, "chunks", json.dumps(body), token_ids.tobytes(), logprobs.tobytes())


def _body(event: Event) -> str:
    match event:
        case Admitted(group, prompts):
            return json.dumps({"group": group, "prompts": prompts})
        case Rewarded(group_id, rewards):
            return json.dumps([group_id, list(rewards.items())])
        case Rejected(group_id, reason):
            return json.dumps([group_id, reason])
        case Trained(group_ids, step):
            return json.dumps({"groups": group_ids, "step": step.to_dict()})
    raise TypeError(f"{event!r} is no event")


def _sealed(number: int, first: int, kind: str, body: str, token_ids: bytes = b"", logprobs: bytes = b"") -> Record:
    return (number, first, kind, body, token_ids, logprobs, _checksum(number, first, kind, body, token_ids, logprobs))


def _checksum(number: int, first: int, kind: str, body: str, token_ids: bytes, logprobs: bytes) -> int:
    checksum = zlib.crc32(f"{number} {first} {kind} {body}".encode())
    return zlib.crc32(logprobs, zlib.crc32(token_ids, checksum))


def _record_after(path: Path, database: sqlite3.Connection, position: int) -> Record:
    """The record that holds the event after `position`, whole."""
    record = _ask(path, database, "SELECT * FROM records WHERE number > ? ORDER BY number LIMIT 1", position)
    if record is None or record[1] > position + 1:
        raise DamageError(f"{path}: the record of event {position + 1} is missing")
    try:
        whole = _checksum(*record[:6]) == record[6]
    except (TypeError, AttributeError, UnicodeError):
        whole = False
    if not whole:
        raise DamageError(f"{path}: record {record[0]} is damaged: its checksum is not the one written with it")
    checked: Record = record
    return checked


def _events(path: Path, record: Record) -> list[Event]:
    number, _, kind, text, token_ids, logprobs, _ = record
    try:
        body = json.loads(text)
        match kind:
            case "chunks":
                return _chunks(body, np.frombuffer(token_ids, "<i4").tolist(), np.frombuffer(logprobs, "<f8").tolist())
            case "admitted":
                return [Admitted(body["group"], body["prompts"])]
            case "rewarded":
                return [Rewarded(body[0], dict(body[1]))]
            case "rejected":
                return [Rejected(body[0], Rejection(body[1]))]
            case "trained":
                return [Trained(body["groups"], Step.from_dict(body["step"]))]
        raise ValueError(f"its kind {kind!r} is not known")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DamageError(f"{path}: record {number} cannot be read: {error}") from None


def _chunks(body: Any, token_ids: list[int], logprobs: list[float]) -> list[Event]:
    events: list[Event] = []
    start = 0
    for sample_id, version, count, finish in body:
        end = start + count
        reason = None if finish is None else FinishReason(finish)
        events.append(Chunk(sample_id, token_ids[start:end], logprobs[start:end], version, reason))
        start = end
    return events


def _open(path: Path) -> sqlite3.Connection:
    """The database at `path`, of this format and open to this process alone."""
    existed = path.exists()
    _check_log(path)
    database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # a commit is on disk, not merely on its way there
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (found,) = database.execute("PRAGMA user_version").fetchone()
        empty = database.execute("SELECT 1 FROM sqlite_master").fetchone() is None
        if empty and application == found == 0:
            _make(database, uuid.uuid4().hex, 0)
        elif application != APPLICATION:
            raise DamageError(f"{path}: an SQLite file, but no journal of april")
        elif found > FORMAT:
            raise JournalError(
                f"{path}: written by a newer april, in format {found}; this one reads up to {FORMAT}: upgrade april-rl"
            )
        else:
            for older in range(found, FORMAT):
                script = f"BEGIN IMMEDIATE; {UPGRADES[older]}; PRAGMA user_version = {older + 1}; COMMIT;"
                database.executescript(script)
    except sqlite3.Error as error:
        database.close()
        if "locked" in str(error):
            raise JournalError(f"{path}: open in another process: one run at a time") from None
        raise DamageError(f"{path}: {_damage(error)}") from None
    except JournalError:
        database.close()
        raise
    if not existed:
        sync_directory(path.parent)
    return database


def _make(database: sqlite3.Connection, run: str, start: int) -> None:
    header = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT};"
    database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO run VALUES ('{run}', {start:d}); {header} COMMIT;")


def _identity(path: Path, database: sqlite3.Connection) -> tuple[str, int]:
    identity = _ask(path, database, "SELECT id, start FROM run")
    if identity is None or not isinstance(identity[0], str) or not isinstance(identity[1], int):
        raise DamageError(f"{path}: damaged: it does not say which run it belongs to")
    run, start = identity
    return run, start


def _ask(path: Path, database: sqlite3.Connection, question: str, *values: object) -> Any:
    """The first row of the answer; None if there is none."""
    try:
        return database.execute(question, values).fetchone()
    except (sqlite3.Error, UnicodeError, OverflowError) as error:
        raise DamageError(f"{path}: {_damage(error)}") from None


def _damage(error: Exception) -> str:
    return f"cannot be read: {error}"


def _check_log(path: Path) -> None:
    """Refuse a write-ahead log that is damaged before its end. SQLite would leave out the rest and say nothing.

    Every transaction is on disk before the next begins, so a crash makes at most the last one unreadable: with two that
    are behind the first unreadable frame, it was no crash. The format is documented at
    sqlite.org/fileformat2.html#the_write_ahead_log.
    """
    log = Path(f"{path}-wal")
    data = log.read_bytes() if log.exists() else b""
    if len(data) < 56:  # no frame: what a crash leaves of a log that is begun
        return
    order = ">u4" if data[3] & 1 else "<u4"
    page, seed = int.from_bytes(data[8:12], "big"), np.frombuffer(data[24:32], ">u4").tolist()
    if _log_checksums(np.frombuffer(data[:24], order)[None], 0, 0) != [tuple(seed)]:
        raise DamageError(f"{log}: damaged: the checksum of its header is not the one written with it")
    count = (len(data) - 32) // (24 + page)
    frames = np.frombuffer(data, np.uint8, count * (24 + page), 32).reshape(count, 24 + page)
    fields = np.ascontiguousarray(frames[:, :24]).view(">u4")
    current = (frames[:, 8:16] == np.frombuffer(data[16:24], np.uint8)).all(1)  # others are of an earlier log
    commits = (fields[:, 1] > 0) & current
    sums = _log_checksums(np.ascontiguousarray(np.delete(frames, np.s_[8:24], 1)).view(order), *seed)
    whole = [found == tuple(field[4:].tolist()) for found, field in zip(sums, fields, strict=True)]
    readable = next((i for i in range(count) if not (whole[i] and current[i])), count)
    if commits[readable:].sum() > 1:
        raise DamageError(
            f"{log}: damaged before its end: of {commits.sum()} writes {commits[:readable].sum()} can be read"
        )


def _log_checksums(rows: NDArray[np.uint32], first: int, second: int) -> list[tuple[int, int]]:
    """The running checksum of a write-ahead log after each row of an even number of words.

    A pair of words (x, y) makes (s, t) into (s + x + t, t + y + s + x + t), modulo 2^32: a linear recurrence, so that a
    row's share is a product with Fibonacci numbers.
    """
    pairs = rows.shape[1] // 2
    weights = np.zeros((2, pairs, 2), np.uint64)
    a, b = 1, 1  # what one unit of x, then of y, has become at the end of the row
    c, d = 0, 1
    for i in reversed(range(pairs)):
        weights[:, i] = [[a, c], [b, d]]
        a, b, c, d = (x & 0xFFFFFFFF for x in (a + b, a + 2 * b, c + d, c + 2 * d))
    shares = rows.astype(np.uint64) @ weights.reshape(2, -1).T & np.uint64(0xFFFFFFFF)
    # The same recurrence on (s, t) alone: after n pairs, the matrix [[1, 1], [1, 2]] to the n-th power.
    p, q, r = 1, 0, 1
    for _ in range(pairs):
        p, q, r = (x & 0xFFFFFFFF for x in (p + q, q + r, q + 2 * r))
    sums = []
    for x, y in shares.tolist():
        first, second = (p * first + q * second + x) & 0xFFFFFFFF, (q * first + r * second + y) & 0xFFFFFFFF
        sums.append((first, second))
    return sums


def salvage(path: Path, mark: Mapping[str, Any] | None, events: bool = True) -> tuple[Path, int]:
    """Put a journal in the place of the one at `path` that a saved state can go on with.

    Args:
        mark: the state's place in its journal; None if it had none.
        events: take over what happened after the state, as far as the records are whole; else nothing.

    Returns:
        The name beside `path` under which the old file is kept, and the number of events taken over.
    """
    run, position = (uuid.uuid4().hex, 0) if mark is None else (mark["run"], mark["position"])
    kept = free_name(path)
    _copy(path, kept)
    # SQLite tidies up what it opens, so that even reading changes a file.
    reading = path.with_name(path.name + ".reading")
    _copy(path, reading)
    records: list[Record] = []
    with suppress(sqlite3.Error, JournalError), closing(sqlite3.connect(reading)) as database:
        if mark is None:
            run = _identity(reading, database)[0]
        if events and _identity(reading, database)[0] == run:
            while True:
                record = _record_after(reading, database, records[-1][0] if records else position)
                _events(reading, record)
                records.append(record)
    for remains in path.parent.glob(f"{reading.name}*"):
        remains.unlink()
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    database = sqlite3.connect(fresh, isolation_level=None)
    _make(database, run, position)
    with database as transaction:
        transaction.execute("BEGIN")
        transaction.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", records)
    database.close()
    Path(f"{path}-wal").unlink(missing_ok=True)
    fresh.replace(path)
    sync_directory(path.parent)
    return kept, records[-1][0] - position if records else 0


def _copy(path: Path, other: Path) -> None:
    for suffix in ("", "-wal"):
        Path(f"{other}{suffix}").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}{suffix}", f"{other}{suffix}")
            sync_file(Path(f"{other}{suffix}"))
