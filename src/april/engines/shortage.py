"""How a shortage of memory shows."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed. On CPUs and some accelerators only the message says so."""
    text = str(error).lower()
    said = isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def release_cached() -> None:
    """Return memory that nothing refers to any more to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
