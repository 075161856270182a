"""Checkpoints of a run: policy, optimizer and rollout state of the same moment.

Invariants:
- a checkpoint has its name only when it is complete and on disk: it is written to a temporary folder, synced, renamed;
- policy, optimizer, rollout buffer, data position and journal position belong to the same step, and one rename commits
  all of them;
- every file has a checksum in the manifest, and no file is used before all checksums match;
- all files are safetensors, JSON and plain bytes (`rollout.state_files`), which contain no executable code.

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

from april.disk import follow_umask, sync_directory, sync_file
from april.rollout.state_files import pack_state, read_state, write_routes_file
from april.training.rank_protocol import RankLostError

ADAPTER = "adapter"
TRAINING = "training"
STATE = "april.json"
MANIFEST = "manifest.json"
FORMAT = 10
"""Version of the format; checkpoints of other versions are refused."""


class CheckpointError(Exception):
    """There is no checkpoint to resume from, or it cannot be read or written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files differ from those that were saved."""


def save_checkpoint(
    directory: Path,
    step: int,
    learner: Callable[[Path], None],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest `keep`. An existing checkpoint of `step` is kept.

    Args:
        directory: folder of all checkpoints.
        learner: writes the policy and the learner's state into a folder (`Learner.save`).
        state: all other state, as `pack_state` takes it.

    Raises:
        CheckpointError: the checkpoint cannot be written; earlier checkpoints are unchanged.
        RankLostError: another rank was lost; earlier checkpoints are unchanged.
    """
    path = directory / f"step-{step:06d}"
    if path.exists():
        return path
    partial = directory / f".{path.name}.partial"
    try:
        # Left by a process that died while it wrote or deleted a checkpoint.
        for stray in directory.glob(".*.partial"):
            shutil.rmtree(stray)
        partial.mkdir(parents=True)
        learner(partial)
        text, routes = pack_state({"format": FORMAT, "step": step, **state})
        write_routes_file(partial / STATE, text, routes)
        (partial / STATE).write_text(text)
        _seal(partial)
        # All files are on disk before the rename, and the rename is on disk before older checkpoints are deleted.
        partial.rename(path)
        sync_directory(directory)
    # Kept apart from disk errors: all ranks restart after this one.
    except RankLostError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except Exception as error:  # each library has its own exception for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{path}: this checkpoint cannot be written: {error}") from error
    for old in checkpoints(directory)[:-keep]:
        remains = directory / f".{old.name}.partial"
        old.rename(remains)  # so that no partly deleted checkpoint has a complete one's name
        shutil.rmtree(remains)
    return path


def _seal(partial: Path) -> None:
    """Write the manifest, set permissions by the umask, and sync all files to disk."""
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
        # The format is compared before the manifest is read: other formats may have another manifest.
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
            raise DamagedCheckpointError(f"{path / MANIFEST}: damaged: its own checksum does not match")
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
    """Return the checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_state(path: Path) -> dict[str, Any]:
    """Return the state in the checkpoint at `path`, without the learner's.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    try:
        return read_state(path / STATE)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path}: this checkpoint cannot be read: {error}") from None


def load_mark(path: Path) -> dict[str, Any] | None:
    """Return the journal position of the checkpoint at `path`; None if the run had no journal."""
    mark: dict[str, Any] | None = json.loads((path / STATE).read_text())["rollout"].get("journal")
    return mark
