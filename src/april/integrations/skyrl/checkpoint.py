"""The rollout buffer in a checkpoint of SkyRL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.utils.io import io

from april.integrations.skyrl.generator import Generator
from april.rollout.state_files import SUFFIX, pack_state, unpack_state

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
        text, pieces = pack_state(state)
        if pieces:
            with io.open_file(os.path.join(folder, STATE + SUFFIX), "wb") as file:
                for piece in pieces:
                    file.write(piece)
        with io.open_file(os.path.join(folder, STATE), "w") as file:
            file.write(text)


def load_state(generator: Generator, folder: str) -> None:
    """Load the buffer of a checkpoint, if it has one."""
    path = os.path.join(folder, STATE) if folder else ""
    if path and io.exists(path):
        content, second = b"", path + SUFFIX
        if io.exists(second):
            with io.open_file(second, "rb") as file:
                content = file.read()
        with io.open_file(path, "r") as file:
            generator.load_state_dict(unpack_state(file.read(), content, second), path)
