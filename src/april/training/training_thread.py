"""Thread for training and saving, so that the event loop stays free for health checks, restarts, server logs and
signals.

Invariants:
- work runs one piece at a time, always in the same thread, with the process's number of compute threads, so results do
  not depend on the thread (autograd modes are per thread, and no code sets them outside);
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
        # OpenMP and MKL keep the number of threads per thread, so a new thread has to set it itself.
        settings = (torch.get_num_threads(),)
        self._thread = ThreadPoolExecutor(1, "training", torch.set_num_threads, settings)

    async def run(self, work: Callable[..., T], *args: object, interrupt: Callable[[], None] | None = None) -> T:
        """Run `work(*args)` in the thread and return its result.

        Args:
            interrupt: called in the caller's thread on cancellation, to make the work end early. This waits for the end
                of the work in any case.
        """
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            # Work that changes parameters is never abandoned: a cancelled caller waits for its end.
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            if interrupt is not None:
                interrupt()
            await asyncio.wait((doing,))
            doing.exception()  # mark it as retrieved: the caller was cancelled
            raise

    async def __aenter__(self) -> TrainingThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown()
