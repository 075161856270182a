"""The state of rollouts as two files: JSON, and the routes of its samples as bytes, to which the JSON refers by place.

Invariants:
- the state that is read equals the state that was written, or reading raises one line that names the damaged file;
- at any moment, also while a state replaces another one, the JSON and the second file to which it refers are of one
  state: a second file's name contains its checksum, the JSON is replaced behind it, and the old one is removed last;
- rows with which the routes of two consecutive samples begin are written once: samples of a group share their prompt.
"""

from __future__ import annotations

import glob
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from april.disk import python_value, sync_directory, sync_file, write_whole
from april.rollout.trajectory.routes import Experts, Routes, decode_experts, encode_experts

SUFFIX = ".routes"
"""Ending of the second file's name, behind its checksum."""
MARK = "april.routes"
"""Key of a reference to routes in the JSON."""
FILE = "routes_file"
"""Key of the second file's size in bytes and checksum, the last one of the JSON."""
REFERENCE = re.compile(rf', "{FILE}": \[\d+, (\d+)\]}}\Z')
"""End of the JSON of a state with a second file."""
COMPARED = 256
"""Rows that are compared at once, to find rows that two samples share."""


class StateFileError(ValueError):
    """A file of a saved state is damaged or missing."""


def pack_state(state: Mapping[str, Any]) -> tuple[str, list[memoryview]]:
    """Return a state as JSON, and the content of its second file in pieces; no pieces if no sample has routes.

    Args:
        state: JSON types, values of NumPy and torch, and `Routes`.

    Raises:
        TypeError, ValueError: a value has no form in JSON.
    """
    pieces = _Pieces()
    text = json.dumps(state, default=pieces.refer)
    if pieces.size:
        text = f"{text[:-1]}, {json.dumps(FILE)}: {json.dumps([pieces.size, pieces.checksum])}}}"
    return text, pieces.content


def unpack_state(text: str, content: bytes | memoryview, where: object) -> dict[str, Any]:
    """Return the state that `pack_state` was given.

    Args:
        content: the second file's content; empty if there is no such file.
        where: name of the second file, for the error message.

    Raises:
        StateFileError: the second file is not the one that was written with the JSON.
        ValueError: the text is not JSON.
    """
    state: dict[str, Any] = json.loads(text, object_hook=lambda found: _routes(found, content, where))
    size, checksum = state.pop(FILE, (0, 0))
    if size and (len(content) != size or zlib.crc32(content) != checksum):
        raise StateFileError(f"{where}: {_fault(content, size)}")
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state as the file `path`, and its routes beside it, in the place of a state that had the same name
    before. See `pack_state`."""
    text, pieces = pack_state(state)
    written = write_routes_file(path, text, pieces)
    write_whole(path, text)
    for old in path.parent.glob(f"{glob.escape(path.name)}.*{SUFFIX}*"):
        if old != written:
            old.unlink(missing_ok=True)


def write_routes_file(path: Path, text: str, pieces: Sequence[memoryview]) -> Path | None:
    """Write the second file of the state with the JSON `text`, which will be in `path`, to disk, and return its name.

    Returns:
        None if the state has no second file.
    """
    if (file := routes_file(path, text)) is None:
        return None
    fresh = file.with_name(file.name + ".new")
    with fresh.open("wb") as stream:
        for piece in pieces:
            stream.write(piece)
    sync_file(fresh)
    fresh.replace(file)
    sync_directory(file.parent)
    return file


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that `write_state` has written.

    Raises:
        OSError: a file cannot be read.
        StateFileError, ValueError: see `unpack_state`.
    """
    text = path.read_text(encoding="utf-8")
    file = routes_file(path, text)
    # Mapped, and not read: rows are copied once, into the samples.
    content: bytes | memoryview = b""
    if file is not None and file.is_file() and file.stat().st_size:
        content = np.memmap(file, np.uint8, "r").data
    return unpack_state(text, content, file)


def routes_file(path: Path, text: str) -> Path | None:
    """Return the name of the second file of the state in `path`, whose JSON is `text`; None if there is none."""
    end = REFERENCE.search(text, max(len(text) - 100, 0))
    return None if end is None else path.with_name(f"{path.name}.{int(end[1]):08x}{SUFFIX}")


class _Pieces:
    """Content of a second file while its JSON is made."""

    def __init__(self) -> None:
        self.content: list[memoryview] = []
        self.size = 0
        self.checksum = 0
        self._last: Experts | None = None
        self._blocks: list[tuple[int, int]] = []
        """Position in bytes and rows of each block of the last routes."""

    def refer(self, value: Any) -> Any:
        """Return what stands in the JSON for a value that is no JSON type."""
        if not isinstance(value, Routes):
            return python_value(value)
        experts = value.experts
        same = 0 if self._last is None else _same_rows(self._last, experts)
        blocks = list(_first(self._blocks, same))
        if same < len(experts):
            piece = encode_experts(experts[same:])
            blocks.append((self.size, len(experts) - same))
            self.content.append(piece)
            self.size, self.checksum = self.size + len(piece), zlib.crc32(piece, self.checksum)
        self._last, self._blocks = experts, blocks
        return {MARK: [experts.dtype.name, *experts.shape[1:], blocks]}


def _same_rows(one: Experts, other: Experts) -> int:
    """Return the number of rows with which both begin."""
    if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
        return 0
    most = min(len(one), len(other))
    for start in range(0, most, COMPARED):
        end = min(start + COMPARED, most)
        differing = (one[start:end] != other[start:end]).any((1, 2))
        if differing.any():
            return start + int(differing.argmax())
    return most


def _first(blocks: Sequence[tuple[int, int]], rows: int) -> Iterator[tuple[int, int]]:
    """Yield the blocks of the first `rows` rows."""
    for position, count in blocks:
        if rows <= 0:
            return
        yield position, min(count, rows)
        rows -= count


def _routes(found: dict[str, Any], content: bytes | memoryview, where: object) -> Any:
    if list(found) != [MARK] or not isinstance(found[MARK], list):
        return found
    dtype, layers, top_k, blocks = found[MARK]
    row = layers * top_k * np.dtype(dtype).itemsize
    if any(position + count * row > len(content) for position, count in blocks):
        raise StateFileError(f"{where}: {_fault(content, math.inf)}")
    experts: Any = np.empty((sum(count for _, count in blocks), layers, top_k), dtype)
    end = 0
    for position, count in blocks:
        start, end = end, end + count
        piece = content[position : position + count * row]
        experts[start:end] = decode_experts(piece, (count, layers, top_k), dtype, copy=False)
    return Routes(experts)


def _fault(content: bytes | memoryview, size: float) -> str:
    if not len(content):
        return "missing: the routes of unfinished samples are in it"
    return f"damaged: {'truncated' if len(content) < size else 'its checksum is not the one saved with it'}"
