"""Standard output of a run, which may close before the run ends.

Invariants:
- printing never raises an OSError: once the reader of the pipe, or the terminal, is gone, nothing is printed;
- no secret is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from april.secrets import redact


class Output:
    """A text file that may break.

    Args:
        file: written to until it breaks.
        on_broken: called once, with the error, in the thread that was printing.
    """

    def __init__(self, file: TextIO, on_broken: Callable[[OSError], None] = lambda error: None) -> None:
        self._file = file
        self._on_broken = on_broken
        self.broken = False

    def write(self, text: str) -> int:
        self._attempt(self._file.write, redact(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def _attempt(self, work: Callable[..., object], *args: str) -> None:
        if self.broken:
            return
        try:
            work(*args)
        except OSError as error:
            self.broken = True
            self._on_broken(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
