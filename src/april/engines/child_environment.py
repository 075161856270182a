"""The environment of processes that a rank starts and that are no ranks themselves: servers, engines, readers.

Invariant: none of them acts as a rank of the trainer's job, or connects to the store of its launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

LAUNCHER = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    )
)
"""Variables in which torchrun and other launchers pass a process its rank."""
ELASTIC = "TORCHELASTIC_"


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this process's environment without the variables of a launcher of ranks."""
    return {name: value for name, value in environment.items() if name not in LAUNCHER and not name.startswith(ELASTIC)}
