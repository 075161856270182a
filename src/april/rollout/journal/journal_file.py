"""The files of a journal: a directory of segments, each a header followed by records.

A segment is named after its first event. Another one begins behind each saved state and after `SEGMENT_BYTES`, so that
pruning removes whole files. Nothing that is on disk is ever written again.

Invariants:
- one process at a time has a journal open;
- a commit is on disk before the next one begins, so a crash makes nothing unreadable but records of the last commit (a
  torn tail). They are left out, and removed before the first write. Any other unreadable record is an error that names
  the file and the event, and no record behind it is used;
- reading changes no file, and holds one record in memory.
"""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from april.disk import free_name, sync_directory, sync_file
from april.rollout.journal.records import Record, decode

FORMAT = 5
MAGIC = b"APRLJRNL"
SEGMENT = struct.Struct("<8sI16sQ")
"""Header of a segment: `MAGIC`, format, run, number of the first event. A checksum follows."""
MARKER = b"\xa5rec"
"""The first bytes of a record, by which records are found behind damage."""
RECORD = struct.Struct("<?QQI")
"""Header of a record, after its marker and checksum: whether it opens a commit, the numbers of its first and last
event, and the length of its content in bytes."""
CHECKSUM = struct.Struct("<I")
SEGMENT_HEADER = SEGMENT.size + CHECKSUM.size
RECORD_HEADER = len(MARKER) + CHECKSUM.size + RECORD.size
SEGMENT_BYTES = 64 << 20
"""Bytes after which a segment is complete."""
WINDOW = 1 << 20
"""Bytes that are searched at a time for a record behind damage."""


class JournalError(Exception):
    """A journal that cannot be written, or not by this process."""


class DamageError(JournalError):
    """A journal that a saved state cannot resume from as it is. `repair_journal` keeps the part that is whole."""


class Found(NamedTuple):
    """A record in its file."""

    record: Record
    opens: bool
    """Whether the record is the first of a commit."""
    end: int
    """Where the record ends, in bytes from the beginning of the file."""


class Place(NamedTuple):
    """Where a record begins."""

    segment: Path
    offset: int
    first: int
    """Number of the record's first event."""


class JournalFile:
    """The journal in the directory `path`, which is made if it is missing.

    Attributes:
        run: id of the run; a saved state belongs to the journal of its own run only.
        start: number of the last event that was pruned.
        last: number of the last event.

    Raises:
        DamageError: the path is no journal, or its last segment is damaged.
        JournalError: another process has the journal open, or a newer april has written it.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise DamageError(f"{path}: no journal of april, which is a directory")
        self.path = path
        if not path.exists():
            path.mkdir()
            # A crash may otherwise lose the new directory, with files that were synced in it.
            sync_directory(path.parent)
        self._lock = _locked(path)
        self._descriptor: int | None = None
        """The last segment, once it is written to."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        segments = segments_of(self.path)
        header = read_header(segments[-1]) if segments else None
        if segments and header is None:  # its header was never on disk: a crash came before its first event
            _require_torn(segments[-1], 0, f"event {_first(segments[-1])}")
            segments.pop()
            header = read_header(segments[-1]) if segments else None
        if header is None:
            if segments:
                raise DamageError(f"{segments[-1]}: damaged: its header cannot be read")
            self.run, self.start, self.last = uuid.uuid4().hex, 0, 0
            _make_segment(self.path, self.run, 1)
            segments = segments_of(self.path)
        else:
            self.run, self.start = header[0], _first(segments[0]) - 1
        self._end, self.last = whole_part(segments[-1])

    def read(self, position: int, near: Place | None = None) -> Iterator[tuple[Record, Place]]:
        """Yield the records of the events after `position`, each with its place.

        Args:
            near: the place of any record; the search begins there if it is not behind the first record to yield.

        Raises:
            DamageError: a record is damaged or missing; the message names it.
        """
        return _read(self.path, self.run, position, self.last, near)

    def append(self, records: Sequence[Record], new_segment: bool = False) -> None:
        """Write a commit. When this returns, it is on disk."""
        if self._descriptor is None:
            # Not on opening: a journal that is only read is not changed.
            self._remove_torn_tail()
        if new_segment or self._end >= SEGMENT_BYTES:
            self._close_segment()
            _make_segment(self.path, self.run, records[0].first)
            self._end = SEGMENT_HEADER
        if self._descriptor is None:
            self._descriptor = os.open(segments_of(self.path)[-1], os.O_WRONLY | os.O_APPEND)
        for number, record in enumerate(records):
            # One fsync ends the commit, so a crash may leave any of its records. The flag marks the first one, by which
            # `_require_torn` recognises a later commit.
            header = RECORD.pack(number == 0, record.first, record.last, len(record.content))
            checksum = CHECKSUM.pack(zlib.crc32(record.content, zlib.crc32(header)))
            _write(self._descriptor, b"".join((MARKER, checksum, header, record.content)))
            self._end += RECORD_HEADER + len(record.content)
        os.fsync(self._descriptor)
        self.last = records[-1].last

    def _remove_torn_tail(self) -> None:
        for segment in reversed(segments_of(self.path)):
            if read_header(segment) is not None:
                os.truncate(segment, self._end)
                sync_file(segment)
                return
            segment.unlink()

    def prune(self, position: int) -> None:
        """Remove the segments that hold no event after `position`; the last segment always stays."""
        # Oldest first: a process that dies in between leaves no gap.
        for segment, following in pairwise(segments_of(self.path)):
            if _first(following) - 1 > position:
                break
            segment.unlink()
            self.start = _first(following) - 1
        sync_directory(self.path)

    def _close_segment(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        self._close_segment()
        self._lock.close()


def repair_journal(path: Path, mark: Mapping[str, Any] | None, events: bool = True) -> tuple[Path, int]:
    """Cut a journal down to the part that a saved state can resume from.

    Args:
        mark: the state's place in its journal; None if the state has none.
        events: keep the events after the state, as far as records are whole; otherwise none of them.

    Returns:
        The path under which the old journal is kept, and the number of events after the state that stay.
    """
    kept = free_name(path)
    kept.mkdir()
    path.mkdir(exist_ok=True)
    for segment in segments_of(path):
        # Links suffice: `_cut` replaces or removes segments, and never changes one.
        os.link(segment, kept / segment.name)
    sync_directory(kept)
    sync_directory(path.parent)
    run, position = (None, 0) if mark is None else (mark["run"], mark["position"])
    if run is None:
        headers = [header for segment in segments_of(path) if (header := read_header(segment)) is not None]
        run = headers[0][0] if headers else uuid.uuid4().hex
    last = position
    with suppress(JournalError, ValueError):
        for record, _ in _read(path, run, position) if events else ():
            decode(record)
            last = record.last
    _cut(path, run, last)
    return kept, last - position


def _cut(path: Path, run: str, last: int) -> None:
    """Drop every event after `last`, and every segment of another run. Files that are linked elsewhere stay whole."""
    segments = segments_of(path)
    newest = max((segment for segment in segments if _first(segment) <= last + 1), default=None)
    end = None if newest is None else _end_of(newest, run, last)
    # Newest first: a process that dies in between leaves no gap.
    for segment in reversed(segments):
        header = read_header(segment)
        if (segment != newest or end is None) and (_first(segment) > last or header is None or header[0] != run):
            segment.unlink()
    if newest is None or end is None:
        _make_segment(path, run, last + 1)
        return
    # A shorter copy, not `truncate`: the journal that is kept shares this file through a hard link.
    shortened = newest.with_suffix(".new")
    with newest.open("rb") as source, shortened.open("wb") as target:
        target.write(_segment_header(run, _first(newest)))
        source.seek(SEGMENT_HEADER)
        while (left := end - source.tell()) > 0:
            target.write(source.read(min(left, WINDOW)))
        target.flush()
        os.fsync(target.fileno())
    shortened.replace(newest)
    sync_directory(path)


def _end_of(segment: Path, run: str, last: int) -> int | None:
    """Return where the events of a segment up to `last` end; None if they do not end in this segment."""
    if _first(segment) == last + 1:
        return SEGMENT_HEADER
    header = read_header(segment)
    if header is None or header[0] != run:
        return None
    with segment.open("rb") as file:
        end = SEGMENT_HEADER
        while (found := _record_at(file, end)) is not None:
            end = found.end
            if found.record.last == last:
                return end
    return None


def segments_of(path: Path) -> list[Path]:
    """Return the segments of a journal, oldest first."""
    return sorted(path.glob("*.events"))


def _first(segment: Path) -> int:
    """Return the number of the first event of a segment."""
    try:
        return int(segment.stem)
    except ValueError:
        raise DamageError(f"{segment}: no segment of a journal: it is not named after an event") from None


def read_header(segment: Path) -> tuple[str, int] | None:
    """Return the run of a segment and the number of its first event; None if the header cannot be read.

    Raises:
        JournalError: another april has written the segment.
    """
    with segment.open("rb") as file:
        data = file.read(SEGMENT_HEADER)
    if len(data) < SEGMENT_HEADER or CHECKSUM.pack(zlib.crc32(data[: SEGMENT.size])) != data[SEGMENT.size :]:
        return None
    magic, found, run, first = SEGMENT.unpack_from(data)
    if magic != MAGIC or first != _first(segment):
        return None
    if found > FORMAT:
        raise JournalError(
            f"{segment}: written by a newer april, in format {found}; this one reads {FORMAT}: upgrade april-rl"
        )
    if found < FORMAT:
        raise JournalError(
            f"{segment}: written by an older april, in format {found}; this one reads {FORMAT}: finish the run with "
            "the april that began it"
        )
    return run.hex(), first


def _segment_header(run: str, first: int) -> bytes:
    header = SEGMENT.pack(MAGIC, FORMAT, bytes.fromhex(run), first)
    return header + CHECKSUM.pack(zlib.crc32(header))


def _make_segment(path: Path, run: str, first: int) -> None:
    with (path / f"{first:015d}.events").open("wb") as file:
        file.write(_segment_header(run, first))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path)


def _read(
    path: Path, run: str, position: int, last: int | None = None, near: Place | None = None
) -> Iterator[tuple[Record, Place]]:
    """Yield the records of the events after `position` up to `last`, or to the end; see `JournalFile.read`.

    Bytes after `last` are not read: they may be a torn tail, or a record that the writer's thread is writing.
    """
    if last is not None and position >= last:
        return
    segments = segments_of(path)
    start = max((i for i, segment in enumerate(segments) if _first(segment) <= position + 1), default=0)
    for segment in segments[start:]:
        if last is not None and position >= last:
            return
        header = read_header(segment)
        if header is None or header[0] != run:
            raise DamageError(f"{segment}: damaged: its header is not that of run {run}")
        with segment.open("rb") as file:
            helps = near is not None and near.segment == segment and near.first <= position + 1
            at = near.offset if near is not None and helps else SEGMENT_HEADER
            while at < os.fstat(file.fileno()).st_size and (last is None or position < last):
                found = _record_at(file, at)
                if found is None:
                    raise DamageError(f"{segment}: damaged: the record of event {position + 1} cannot be read")
                if found.record.last > position:
                    if found.record.first > position + 1:
                        raise DamageError(f"{segment}: the record of event {position + 1} is missing")
                    yield found.record, Place(segment, at, found.record.first)
                    position = found.record.last
                at = found.end
    if last is not None and position < last:
        raise DamageError(f"{path}: the record of event {position + 1} is missing")


def _record_at(file: BinaryIO, at: int) -> Found | None:
    """Return the record at a place in a file; None if it is not whole."""
    file.seek(at)
    header = file.read(RECORD_HEADER)
    if len(header) < RECORD_HEADER or not header.startswith(MARKER):
        return None
    opens, first, last, length = RECORD.unpack_from(header, RECORD_HEADER - RECORD.size)
    end = at + RECORD_HEADER + length
    if end > os.fstat(file.fileno()).st_size:
        return None
    content = file.read(length)
    checksum = zlib.crc32(content, zlib.crc32(header[-RECORD.size :]))
    if CHECKSUM.pack(checksum) != header[len(MARKER) : len(MARKER) + CHECKSUM.size]:
        return None
    return Found(Record(first, last, content), opens, end)


def whole_part(segment: Path) -> tuple[int, int]:
    """Return where the whole records of the last segment end, and the number of the last event.

    Raises:
        DamageError: the segment is damaged before its last commit.
    """
    end, last = SEGMENT_HEADER, _first(segment) - 1
    with segment.open("rb") as file:
        while (found := _record_at(file, end)) is not None:
            if found.record.first != last + 1:
                raise DamageError(f"{segment}: the record of event {last + 1} is missing")
            end, last = found.end, found.record.last
    _require_torn(segment, end, f"event {last + 1}")
    return end, last


def _require_torn(segment: Path, at: int, event: str) -> None:
    """Check that the bytes from `at` on may be of the last commit: no later commit follows them.

    Raises:
        DamageError: a later commit follows.
    """
    with segment.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # A record that is at `at` itself is unreadable: search behind its marker.
        at += 1
        while at < size:
            file.seek(at)
            # Windows overlap by a marker, so that no marker is missed at a border.
            offset = file.read(WINDOW + len(MARKER)).find(MARKER)
            at += WINDOW if offset < 0 else offset
            if offset >= 0:
                found = _record_at(file, at)
                if found is not None and found.opens:
                    raise DamageError(f"{segment}: damaged before its end: the record of {event} cannot be read")
                at += 1


def _locked(path: Path) -> BinaryIO:
    """Return the lock of a journal, which the process holds until it closes the file."""
    lock = (path / "lock").open("ab")
    try:
        # The kernel releases a flock with the process, so a run that died leaves no stale lock.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise JournalError(f"{path}: open in another process: one run at a time") from None
    return lock


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        # `os.write` may write a part only.
        view = view[os.write(descriptor, view) :]
