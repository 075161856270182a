"""Requirements of a run on a node, checked there before the run starts."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from april import __version__
from april.rollout.engine import EngineError


@dataclass(frozen=True, slots=True)
class NodeRequirements:
    """Requirements of a node.

    Args:
        model: a directory, or a hub name; empty if the node needs none.
        output: the run's directory, if the node must share it.
        marker: a file that the trainer has just written there.
        environment: pickled factory of environments, which constructs one where it is unpickled.
        version: april's, as the trainer has it.
    """

    model: str
    output: Path | None = None
    marker: Path | None = None
    environment: bytes | None = None
    version: str = __version__

    def missing(self) -> str:
        """Return the first requirement that this machine does not meet, with the remedy; empty if it meets all."""
        if self.version != __version__:
            return f"it has april {__version__}, the trainer's is {self.version}: install the same"
        if Path(self.model).is_absolute() and not Path(self.model).is_dir():
            return f"model.path = {self.model!r} is not there: put it on a file system that all nodes share"
        if self.marker is not None and not self.marker.is_file():
            return (
                f"reporting.output = {str(self.output)!r} is not the same directory there, and all ranks write "
                "checkpoints into it: name one on a file system that all nodes share"
            )
        if self.environment is not None:
            try:
                pickle.loads(self.environment)
            except Exception as error:  # whatever the user's code does there
                return (
                    f"it cannot be made there ({type(error).__name__}: {error}): what the recipe's "
                    "[environment] names must be on every node under the same name, with the packages that it imports"
                )
        return ""


@contextmanager
def marked(output: Path) -> Iterator[Path]:
    """A new file in a run's directory or, where that is not there yet, in the nearest one above it.

    Raises:
        EngineError: it cannot be written.
    """
    output = output.absolute()
    above = next(path for path in (output, *output.parents) if path.is_dir())
    try:
        file = tempfile.NamedTemporaryFile(prefix=".april-", dir=above)  # noqa: SIM115
    except OSError as error:
        raise EngineError(
            f"reporting.output = {str(output)!r}: nothing can be written to {above} ({error.strerror}); name a "
            "directory on a file system that all nodes share"
        ) from None
    with file:
        yield Path(file.name)
