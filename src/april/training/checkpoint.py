"""A run's checkpoints: policy, optimizer and rollout state of the same moment, together.

Invariants:
- a checkpoint appears under its name only when it is whole and on disk: it is written beside, synced, then renamed;
- policy, optimizer, rollout buffer, data position and the place in the journal in it belong to the same step, so that
  one rename commits them all;
- every file in it has a checksum in the manifest, and nothing is used before all of them agree;
- nothing in it could run: safetensors and JSON.

A checkpoint is a Hugging Face model directory: `AutoModelForCausalLM.from_pretrained` loads it. Of a policy trained by
adapters it holds the merged weights, and the adapters in the folder `adapter`. What else training changes, as the
optimizer's moments, is in the folder `training`, whole tensors by their names, however many ranks wrote them.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.rollout.disk import follow_umask, sync_directory, sync_file
from april.training.rank_protocol import RankLostError

ADAPTER = "adapter"
TRAINING = "training"
STATE = "april.json"
MANIFEST = "manifest.json"
FORMAT = 7
"""Of another one, a checkpoint is refused."""


class CheckpointError(Exception):
    """There is no checkpoint to go on from, or it cannot be read or written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not those that were saved."""


def save_checkpoint(
    directory: Path,
    step: int,
    learner: Callable[[Path], None],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest `keep`. One that is there already stays as it is.

    Args:
        directory: where checkpoints are kept, one folder each.
        learner: writes the policy and its own state into a folder (`Learner.save`).
        state: everything else, as JSON types.

    Raises:
        CheckpointError: it cannot be written; the checkpoints before it are as they were.
        RankLostError: another rank was lost meanwhile; the checkpoints before it are as they were.
    """
    path = directory / f"step-{step:06d}"
    if path.exists():
        return path
    partial = directory / f".{path.name}.partial"
    try:
        for stray in directory.glob(".*.partial"):
            shutil.rmtree(stray)
        partial.mkdir(parents=True)
        learner(partial)
        (partial / STATE).write_text(json.dumps({"format": FORMAT, "step": step, **state}))
        _seal(partial)
        partial.rename(path)
        sync_directory(directory)
    except RankLostError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except Exception as error:  # every library here has exceptions of its own for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{path}: this checkpoint cannot be written: {error}") from error
    for old in checkpoints(directory)[:-keep]:
        remains = directory / f".{old.name}.partial"
        old.rename(remains)  # never half a checkpoint under a whole one's name
        shutil.rmtree(remains)
    return path


def _seal(partial: Path) -> None:
    """Write the manifest, give every file its permissions, and put everything on disk."""
    files = {str(path.relative_to(partial)): path for path in sorted(partial.rglob("*")) if path.is_file()}
    sums = {name: [path.stat().st_size, _checksum(path)] for name, path in files.items()}
    (partial / MANIFEST).write_text(json.dumps({"files": sums, "checksum": _of_sums(sums)}))
    follow_umask(partial)
    for path in (*files.values(), partial / MANIFEST):
        sync_file(path)
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        sync_directory(folder)


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _of_sums(sums: dict[str, list[int]]) -> int:
    return zlib.crc32(json.dumps(sums, sort_keys=True).encode())


def check_checkpoint(path: Path) -> None:
    """Compare every file of the checkpoint at `path` with its checksum.

    Raises:
        DamagedCheckpointError: one differs or is missing; the message names it.
        CheckpointError: another version of april wrote it.
    """
    try:
        found = json.loads((path / STATE).read_text()).get("format")
        other = isinstance(found, int) and found != FORMAT
        manifest = None if other else json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path}: this checkpoint cannot be read: {error}") from None
    if manifest is None:
        raise CheckpointError(
            f"{path}: format {found}, but this version of april reads {FORMAT}: go on with the april-rl that wrote it"
        )
    try:
        sums = manifest["files"]
        if _of_sums(sums) != manifest["checksum"]:
            raise DamagedCheckpointError(f"{path / MANIFEST}: damaged: its own checksum is another")
        for name, (size, checksum) in sums.items():
            file = path / name
            if not file.is_file():
                raise DamagedCheckpointError(f"{file}: missing")
            if file.stat().st_size != size or _checksum(file) != checksum:
                raise DamagedCheckpointError(f"{file}: damaged: its checksum is not the one saved with it")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path / MANIFEST}: damaged: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: this checkpoint cannot be read: {error}") from None


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_state(path: Path) -> dict[str, Any]:
    """Everything of the checkpoint at `path` that is not the learner's.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path}: this checkpoint cannot be read: {error}") from None
    return state


def load_mark(path: Path) -> dict[str, Any] | None:
    """The place in the journal of the checkpoint at `path`; None if it had no journal."""
    mark: dict[str, Any] | None = json.loads((path / STATE).read_text())["rollout"].get("journal")
    return mark
