"""Helpers for journals on disk: contents, copies, truncation, damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from april.rollout.journal.journal_file import JournalFile, read_header, segments_of, whole_part


def last_event(path: Path) -> int:
    """Return the number of the last event on disk, also while a run writes the journal."""
    newest = next((segment for segment in reversed(segments_of(path)) if read_header(segment) is not None), None)
    return 0 if newest is None else whole_part(newest)[1]


def last_events(path: Path) -> list[int]:
    """Return the number of the last event of each record."""
    with closing(JournalFile(path)) as journal:
        return [record.last for record, _ in journal.read(journal.start)]


def place_of(path: Path, event: int) -> tuple[Path, int]:
    """Return the segment and the offset of the record that holds an event."""
    with closing(JournalFile(path)) as journal:
        place = next(place for _, place in journal.read(event - 1))
    return place.segment, place.offset


def cut(path: Path, after: int) -> None:
    """Lose every record after the one whose last event is `after`."""
    if after < last_event(path):
        segment, offset = place_of(path, after + 1)
        os.truncate(segment, offset)
        for later in segments_of(path):
            if later > segment:
                later.unlink()


def copy(path: Path, other: Path) -> Path:
    """Leave at `other` what a process that dies now leaves of the journal at `path`."""
    shutil.rmtree(other, ignore_errors=True)
    return Path(shutil.copytree(path, other))


def damage(path: Path, position: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= value
    path.write_bytes(data)


def content(paths: Sequence[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths}
