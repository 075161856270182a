"""Settings of torch's allocator that exclude sharing device memory with other processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with options of torch's allocator."""
MEMORY_SAVER = "torch_memory_saver"


def without_expandable_segments(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables for servers that release their memory, which expandable segments exclude."""
    names = [name for name in ALLOCATOR if "expandable_segments" in environment.get(name, "")]
    return dict.fromkeys(names, "expandable_segments:False")


def unsharable_memory(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process's device memory cannot be shared with other processes, and the remedy; None if it can."""
    for name in ALLOCATOR:
        if "expandable_segments:True" in environment.get(name, ""):
            return f"{name} sets expandable_segments:True, whose memory CUDA IPC cannot share: remove it"
    if MEMORY_SAVER in environment.get("LD_PRELOAD", ""):
        return f"LD_PRELOAD loads {MEMORY_SAVER}, whose memory CUDA IPC cannot share: start april without it"
    return None
