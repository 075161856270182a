"""One thread for work that takes long, so that the event loop goes on: health checks, revivals, server logs, signals.

Invariants:
- one piece of work at a time, always in the same thread, which computes with the process's number of threads: what is
  computed does not depend on whose thread it is (autograd's modes are a thread's own, and nothing sets them outside);
- no work outlives the `run` that started it, however that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class TrainingThread:
    """Runs work of the training loop in a thread. Use as an async context manager."""

    def __init__(self) -> None:
        # What torch.set_num_threads sets is a new thread's only once it calls it itself (OpenMP and MKL keep it so).
        settings = (torch.get_num_threads(),)
        self._thread = ThreadPoolExecutor(1, "training", torch.set_num_threads, settings)

    async def run(self, work: Callable[..., T], *args: object, interrupt: Callable[[], None] | None = None) -> T:
        """`work(*args)`, in the thread.

        Args:
            interrupt: called from the caller's thread if this is cancelled: lets the work end early. It is waited for
                in any case.
        """
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            if interrupt is not None:
                interrupt()
            await asyncio.wait((doing,))
            doing.exception()  # seen: who cancels wants no result
            raise

    async def __aenter__(self) -> TrainingThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown()
