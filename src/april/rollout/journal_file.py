"""The SQLite file that holds a journal: its format, how it is opened, and its records.

Invariants:
- one process at a time has it open;
- a record that is damaged is an error that names it, and no record behind it is used.
"""

from __future__ import annotations

import sqlite3
import uuid
from pathlib import Path
from typing import Any

from april.rollout.disk import sync_directory
from april.rollout.events import Event
from april.rollout.records import Record, checksum, decode
from april.rollout.write_ahead_log import LogDamage, check_log

FORMAT = 2
APPLICATION = 0x4150524C
"""What marks an SQLite file as a journal: "APRL"."""
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
"""The events up to `start` were pruned; `Record` says what a record holds."""


class JournalError(Exception):
    """A journal that cannot be written, or not by this process."""


class DamageError(JournalError):
    """A journal that a saved state cannot go on with as it is; `salvage` makes one of what is whole in it."""


def open_file(path: Path) -> sqlite3.Connection:
    """The database at `path`, of this format and open to this process alone."""
    existed = path.exists()
    try:
        check_log(path)
    except LogDamage as error:
        raise DamageError(str(error)) from None
    database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # a commit is on disk, not merely on its way there
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (found,) = database.execute("PRAGMA user_version").fetchone()
        empty = database.execute("SELECT 1 FROM sqlite_master").fetchone() is None
        if empty and application == found == 0:
            make(database, uuid.uuid4().hex, 0)
        elif application != APPLICATION:
            raise DamageError(f"{path}: an SQLite file, but no journal of april")
        elif found > FORMAT:
            raise JournalError(
                f"{path}: written by a newer april, in format {found}; this one reads {FORMAT}: upgrade april-rl"
            )
        elif found < FORMAT:
            raise JournalError(
                f"{path}: written by an older april, in format {found}; this one reads {FORMAT}: finish the run with "
                "the april that began it"
            )
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


def make(database: sqlite3.Connection, run: str, start: int) -> None:
    header = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT};"
    database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO run VALUES ('{run}', {start:d}); {header} COMMIT;")


def identity(path: Path, database: sqlite3.Connection) -> tuple[str, int]:
    identity = ask(path, database, "SELECT id, start FROM run")
    if identity is None or not isinstance(identity[0], str) or not isinstance(identity[1], int):
        raise DamageError(f"{path}: damaged: it does not say which run it belongs to")
    run, start = identity
    return run, start


def ask(path: Path, database: sqlite3.Connection, question: str, *values: object) -> Any:
    """The first row of the answer; None if there is none."""
    try:
        return database.execute(question, values).fetchone()
    except (sqlite3.Error, UnicodeError, OverflowError) as error:
        raise DamageError(f"{path}: {_damage(error)}") from None


def _damage(error: Exception) -> str:
    return f"cannot be read: {error}"


def record_after(path: Path, database: sqlite3.Connection, position: int) -> Record:
    """The record that holds the event after `position`, whole."""
    record = ask(path, database, "SELECT * FROM records WHERE number > ? ORDER BY number LIMIT 1", position)
    if record is None or record[1] > position + 1:
        raise DamageError(f"{path}: the record of event {position + 1} is missing")
    try:
        whole = checksum(*record[:6]) == record[6]
    except (TypeError, AttributeError, UnicodeError):
        whole = False
    if not whole:
        raise DamageError(f"{path}: record {record[0]} is damaged: its checksum is not the one written with it")
    checked: Record = record
    return checked


def decoded(path: Path, record: Record) -> list[Event]:
    """The events of a record."""
    try:
        return decode(record)
    except ValueError as error:
        raise DamageError(f"{path}: record {record[0]} cannot be read: {error}") from None
