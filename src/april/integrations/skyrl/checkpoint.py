"""The rollout buffer in a checkpoint of SkyRL."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.utils.io import io

from april.disk import as_json
from april.integrations.skyrl.generator import Generator

STATE = "april.json"
"""File of the rollout buffer."""


def save_state(state: Mapping[str, Any] | None, checkpoints: str, step: int) -> None:
    """Write the buffer into the checkpoint of a step. Call it before SkyRL saves its part, so that no checkpoint that
    SkyRL considers complete lacks the buffer.

    Args:
        state: see `Generator.state_dict`.
        checkpoints: folder of all checkpoints.
    """
    if state is not None:
        folder = os.path.join(checkpoints, f"global_step_{step}")
        io.makedirs(folder, exist_ok=True)
        with io.open_file(os.path.join(folder, STATE), "w") as file:
            file.write(as_json(state))


def load_state(generator: Generator, folder: str) -> None:
    """Load the buffer of a checkpoint, if it has one."""
    path = os.path.join(folder, STATE) if folder else ""
    if path and io.exists(path):
        with io.open_file(path, "r") as file:
            generator.load_state_dict(json.loads(file.read()), path)
