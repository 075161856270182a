"""A run's checkpoints: policy, optimizer and rollout state of the same moment, together.

Invariants:
- a checkpoint appears under its name only when it is whole: it is written beside, then renamed;
- policy, optimizer, rollout buffer and data position in it belong to the same step;
- nothing in it is pickled code: safetensors, JSON, and tensors that are read back as weights only.

A checkpoint is a Hugging Face model directory: `AutoModelForCausalLM.from_pretrained` loads it. Of a policy trained by
adapters it holds the merged weights, and the adapters in the folder `adapter`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ADAPTER = "adapter"
OPTIMIZER = "optimizer.pt"
STATE = "april.json"
FORMAT = 2


class CheckpointError(Exception):
    """There is no checkpoint to go on from, or it cannot be read."""


def save_checkpoint(
    directory: Path,
    step: int,
    policy: Callable[[Path], None],
    learner: dict[str, Any],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest `keep`.

    Args:
        directory: where checkpoints are kept, one folder each.
        policy: writes the policy into a folder.
        learner: the learner's state, tensors in plain containers.
        state: everything else, as JSON types.
    """
    path = directory / f"step-{step:06d}"
    partial = directory / f".{path.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    policy(partial)
    torch.save(learner, partial / OPTIMIZER)
    (partial / STATE).write_text(json.dumps({"format": FORMAT, "step": step, **state}))
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return path


def checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if re.fullmatch(r"step-\d+", path.name) and (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of the run in directory `run`.

    Raises:
        CheckpointError: there is none.
    """
    found = checkpoints(run / "checkpoints")
    if not found:
        raise CheckpointError(f"{run}: no checkpoint to resume from; start the run again without --resume")
    return found[-1]


def load_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The learner's state and everything else of the checkpoint at `path`.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        state = json.loads((path / STATE).read_text())
        learner = torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu")
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: this checkpoint cannot be read: {error}") from None
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {state.get('format')}, but this version of april reads {FORMAT}")
    return learner, state
