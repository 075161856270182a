"""Files of records: JSON lines, a JSON array, Parquet, or a data set of the Hugging Face hub.

Invariant: a record that cannot be read is yielded as its error, with its line; a file that cannot be read is an error
at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any

from april.images.source import data_set
from april.tasks.hub import FILES, read_dataset

NO_SPACE = re.compile(r"[^ \t\n\r]")
Row = tuple[int, "dict[str, Any] | ValueError"]
"""Line of a text file, or number of a record elsewhere, both from 1; and the record, or why there is none."""


def read_rows(path: str, subset: str | None, split: str, setting: str) -> Iterator[Row]:
    """Yield every record of a file, or of a split of a data set.

    Raises:
        ValueError: the file or data set cannot be read.
    """
    if path.lower().endswith(".parquet"):
        return _parquet(Path(path))
    if path.lower().endswith(FILES):
        return _array(Path(path)) if _is_array(Path(path)) else _lines(Path(path))
    return read_dataset(path, subset, split, setting)


def stored_in(path: str, subset: str | None, split: str) -> tuple[str, str | None]:
    """Return the directory that paths in the records are relative to, and the data set that can store images, if any;
    see `april.images.source`."""
    if path.lower().endswith(".parquet"):
        return os.path.dirname(path), path
    if path.lower().endswith(FILES):
        return os.path.dirname(path), None
    return path if os.path.isdir(path) else "", data_set(path, subset, split)


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            if text.strip():
                yield line, _record(text)


def _record(text: bytes) -> dict[str, Any] | ValueError:
    try:
        return _object(_finite.decode(text.decode("utf-8-sig")), text[:40].decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        return ValueError(f"not valid JSON: {error}")


def _object(record: Any, text: str) -> dict[str, Any] | ValueError:
    return record if isinstance(record, dict) else ValueError(f"a record must be a JSON object, this is {text!r}")


def _constant(name: str) -> None:
    """NaN is what tables write where a value is missing; JSON has no infinities."""
    if name != "NaN":
        raise ValueError(f"{name} is no JSON value")


_finite = JSONDecoder(parse_constant=_constant)


def _is_array(path: Path) -> bool:
    """Whether a .json file holds one array, and not an object on each line."""
    if not path.name.lower().endswith(".json"):
        return False
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"[")


def _array(path: Path) -> Iterator[Row]:
    """The objects of a JSON array, each with the line on which it begins."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no text in UTF-8: {error.reason} at byte {error.start}") from None
    line, counted, position = 1, 0, _skip(text, text.index("[") + 1)
    while text[position : position + 1] != "]":
        # Only the lines since the last record: a count from the start would be quadratic in the file.
        line, counted = line + text.count("\n", counted, position), position
        try:
            record, end = _finite.raw_decode(text, position)
            position = _skip(text, end)
            if text[position : position + 1] == ",":
                position = _skip(text, position + 1)
            elif text[position : position + 1] != "]":
                raise JSONDecodeError("Expecting ',' or ']'", text, position)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{line}: not valid JSON: {error}") from None
        yield line, _object(record, text[counted : min(end, counted + 40)])
    if text[position + 1 :].strip():
        raise ValueError(f"{path}: there is more behind the array's end")


def _skip(text: str, position: int) -> int:
    """The position of the next character that is no white space."""
    found = NO_SPACE.search(text, position)
    return found.start() if found else len(text)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, record
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a Parquet file, or damaged after record {row}: {error}") from None
