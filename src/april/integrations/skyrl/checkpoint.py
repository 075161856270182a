"""The rollout buffer in a checkpoint of SkyRL, which is in a folder or in cloud storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.backends.skyrl_train.utils.io import io

from april.integrations.skyrl.generator import Generator
from april.rollout.state_files import read_state, write_state

STATE = "april.json"
"""File of the rollout buffer. The file of its samples' routes lies beside it and begins with this name."""


def save_state(state: Mapping[str, Any] | None, checkpoints: str, step: int) -> None:
    """Write the buffer into the checkpoint of a step. Call it before SkyRL saves its part, so that no checkpoint that
    SkyRL considers complete lacks the buffer.

    Args:
        state: see `Generator.state_dict`.
        checkpoints: folder of all checkpoints, or its address in cloud storage.
    """
    if state is not None:
        with io.local_work_dir(os.path.join(checkpoints, f"global_step_{step}")) as folder:
            write_state(Path(folder, STATE), state)


def load_state(generator: Generator, folder: str) -> None:
    """Load the buffer of a checkpoint, if it has one."""
    path = os.path.join(folder, STATE) if folder else ""
    if path and io.exists(path):
        names = [os.path.basename(name) for name in io.list_dir(folder)]
        with io.local_read_files(folder, [name for name in names if name.startswith(STATE)]) as local:
            generator.load_state_dict(read_state(Path(local, STATE)), path)
