"""A file of JSON lines, one object per training step, that survives crashes and resumes.

Invariants:
- steps never decrease within a file: resuming from step k first cuts every line of a later step;
- a line is whole or it is not there: what a crash left of the last line is cut when the file is opened again;
- every line is JSON by the letter: a number that is not finite, or beyond `LARGEST`, is written as null;
- no line contains a secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from april.secrets import redact


class StepLog:
    """Appends one line per step to `path`, each flushed as it is written.

    Args:
        path: the file; its directory is made.
        resume_step: last step to keep; later lines are cut. None starts a file that must not exist yet.

    Raises:
        FileExistsError: there are steps in the file and `resume_step` is None.
        ValueError: a line other than the last is not a JSON object with a step; the message names file and line.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self.path = path
        self.last_step = -1
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_step is None:
                raise FileExistsError(f"{path} already holds a run: resume that run, or choose another directory")
            self._cut_after(resume_step)
        self._file = path.open("a", encoding="utf-8")

    def _cut_after(self, step: int) -> None:
        keep = 0
        for _, end, record in scan(self.path):
            if record["step"] > step:
                break
            keep, self.last_step = end, record["step"]
        with self.path.open("r+b") as file:
            file.truncate(keep)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`, whose `step` is not smaller than the previous line's."""
        step = record["step"]
        if step < self.last_step:
            raise ValueError(f"{self.path} has reached step {self.last_step} and cannot take step {step}")
        line = redact(json.dumps(plain(record), separators=(",", ":"), allow_nan=False))
        self._file.write(line + "\n")
        self._file.flush()
        self.last_step = step

    def sync(self) -> None:
        """Wait until every line is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def scan(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Every whole line of a step log, in order, as (first byte, byte after the newline, object).

    A last line without a newline, or one that a crash filled with anything but JSON, is left out.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        for number, line in enumerate(file, 1):
            end = start + len(line)
            record = _parse(line) if line.endswith(b"\n") else None
            if record is None and end < size:
                raise ValueError(f"{path}:{number}: not a JSON object with a step; remove the line to go on")
            if record is not None:
                yield start, end, record
            start = end


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


LARGEST = 1e150
"""Numbers beyond this are null in a log: sums, squares and differences of those within it are finite."""


def plain(value: Any) -> Any:
    """`value` as JSON types: NumPy scalars and arrays become Python's, numbers that are not finite, or beyond
    `LARGEST`, become None."""
    if isinstance(value, int | float):
        return value if -LARGEST <= value <= LARGEST else None
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return [plain(item) for item in value]
