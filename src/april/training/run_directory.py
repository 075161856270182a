"""Directory of a run. Two runs never use one directory at the same time, and no run is overwritten."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from april.config.error import ConfigError
from april.disk import free_name
from april.reporting.metrics_log import last_step
from april.training.checkpoint import checkpoints

log = logging.getLogger(__name__)

LOCK = "lock"
RUN = {"metrics.jsonl", "recipe.json"}
"""Files that a run has written once it has begun."""


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Create and lock the directory of a run; the lock ends with the process, however that ends.

    Raises:
        ConfigError: another run has locked it, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Not truncated by opening: the note of a run that holds the lock is part of the error message.
        file = (directory / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"reporting.output = {str(directory)!r}: cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"reporting.output = {str(directory)!r}: another run is going on there ({file.read().strip()}): wait "
                "for it, stop it, or choose another --output"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def prepare_output(directory: Path, if_exists: Literal["error", "rename"]) -> None:
    """Prepare `directory` for a new run.

    The directory must be new, empty, or contain a run, so that an untrusted recipe cannot overwrite other files.
    An existing run is renamed if `if_exists` is "rename" or if it ended before its first training step; it is kept
    because it may be resumed.

    Raises:
        ConfigError: the directory contains a run and `if_exists` is "error", the run is still active, or the directory
            contains other files.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"reporting.output = {str(directory)!r}: this is a file; name a directory")
    found = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if found and not found & {LOCK, *RUN}:
        raise ConfigError(
            f"reporting.output = {str(directory)!r}: this directory holds other files, and no run: choose a new or an "
            "empty one by --output"
        )
    if not found & RUN:
        return
    if if_exists == "error" and _has_trained(directory):
        raise ConfigError(
            f"reporting.output = {str(directory)!r}: there is a run already; go on with it by april resume "
            f"{directory}, choose another --output, or keep it under another name by --if-exists rename"
        )
    with lock_directory(directory):
        kept = directory.rename(free_name(directory))
    log.info("the run that was in %s is kept as %s", directory, kept)


def _has_trained(directory: Path) -> bool:
    """Whether the run in `directory` has finished a training step or written a checkpoint."""
    return bool(checkpoints(directory / "checkpoints")) or last_step(directory) > 0
