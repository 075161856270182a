"""Device memory: free bytes, out-of-memory errors, and returning unused memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator failed. On CPUs and some accelerators only the message shows it."""
    text = str(error).lower()
    said = isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def release_cached(garbage: bool = True) -> None:
    """Return memory that nothing refers to any more to the device.

    Args:
        garbage: also of objects in reference cycles, whose search takes up to seconds in a large process.
    """
    if garbage:
        gc.collect()
    if torch.cuda.is_available():
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # memory that servers have read and released
        torch.cuda.empty_cache()


def discard(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of contiguous tensors whose values are written again before they are read."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    release_cached(garbage=False)


def allocate(tensors: Iterable[torch.Tensor]) -> None:
    """Allocate the memory of discarded tensors; the values of all others stay."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(tensor.nbytes)


def available_host_bytes() -> int:
    """Return the main memory that programs can still take: free pages and droppable caches, within the cgroup's
    limit."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
        return min(available, _cgroup_room())
    return 8 << 30  # this platform (such as macOS) does not report it


def _cgroup_room() -> int:
    """Return the memory that this process's cgroup may still take; very much without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, held = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError, KeyError):  # no second version of cgroups here, or no limit ("max")
        return sys.maxsize
    return max(limit - held + int(stat["inactive_file"]), 0)


def held_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that all processes together hold."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def free_bytes(device: torch.device) -> int:
    """Return the memory that can be taken; of a GPU also what PyTorch holds and does not use. Of main memory it is this
    process's share: the ranks of a job on one machine divide it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
