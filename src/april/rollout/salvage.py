"""A journal made of what is whole in a damaged one."""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from april.rollout.disk import free_name, sync_directory, sync_file
from april.rollout.journal_file import JournalError, decoded, identity, make, record_after
from april.rollout.records import Record


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
            run = identity(reading, database)[0]
        if events and identity(reading, database)[0] == run:
            while True:
                record = record_after(reading, database, records[-1][0] if records else position)
                decoded(reading, record)
                records.append(record)
    for remains in path.parent.glob(f"{reading.name}*"):
        remains.unlink()
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    database = sqlite3.connect(fresh, isolation_level=None)
    make(database, run, position)
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
