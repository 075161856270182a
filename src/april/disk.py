"""Files that are on disk, whole, under a name that is theirs.

Invariant: at any moment, a crash included, a file written here is either the old one or the new one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync_file(path: Path) -> None:
    """Put a file's content on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Put a directory's entries on disk: files made, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is, at any moment, either the old one or the new one."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    sync_file(fresh)
    fresh.replace(path)
    sync_directory(path.parent)


def follow_umask(folder: Path) -> None:
    """Give every file in a folder the permissions that the umask leaves: safetensors writes files that a server of
    another user could not read."""
    probe = folder / ".permissions"
    probe.touch()
    permissions = probe.stat().st_mode & 0o777  # the umask itself cannot be read without changing it
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(permissions)


def as_json(state: Any) -> str:
    """State that others gave a part of, as JSON; what NumPy and torch hold, as Python's own.

    Raises:
        TypeError, ValueError: a value is of a kind that JSON has not.
    """
    return json.dumps(state, default=python_value)


def python_value(value: Any) -> Any:
    """Return a value of NumPy or torch as Python's own.

    Raises:
        TypeError: it is neither.
    """
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} cannot be part of a checkpoint")
    return value.tolist()


def free_name(path: Path, label: str = "") -> Path:
    """Return the next free name next to `path`: `<name>.<label>1`, `<name>.<label>2`, …"""
    number = 1
    while (free := path.with_name(f"{path.name}.{label}{number}")).exists():
        number += 1
    return free
