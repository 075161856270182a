"""Warnings during a run: april's go to the console, other libraries' to a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from april.secrets import redact

FILE_NAME = "library.log"


class _Notes(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"{record.levelname.lower()}: {record.getMessage()}")


class _Library(logging.Handler):
    """Appends to a file as soon as its directory is there: no directory is made for a warning."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._held: list[str] = []
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.split(".")[0] == "april":
            return
        self._held.append(redact(self.format(record)))
        if self._path.parent.is_dir():
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in self._held)
            self._held.clear()


@contextmanager
def messages(note: Callable[[str], None], directory: Path) -> Iterator[None]:
    """Route warnings, inside the block: april's to `note`, other libraries' to `library.log` in the run directory."""
    own, library, root = _Notes(note), _Library(directory / FILE_NAME), logging.getLogger()
    logging.getLogger("april").addHandler(own)
    root.addHandler(library)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(library)
        logging.getLogger("april").removeHandler(own)
