"""Reward functions in worker processes, where one that hangs, crashes or takes too much memory harms nothing else.

Invariants:
- a call ends within its time limit, counted from when a worker takes it up; the worker of a call that does not is
  killed and replaced, and every other call continues;
- calls are taken up in their order; while a call waits and every worker is busy, workers are added one by one, up to
  the limit: quick rewards keep one process, rewards that hang do not hold up the others.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from april.rollout.user_code.user_code import LateError, time_limit
from april.rollout.user_code.workers import STATM, Worker, WorkerLimits

PATIENCE = 0.5
"""Seconds that a call waits for a worker before another one is started."""


class RewardWorkers:
    """`await workers(*args)` is `function(*args)` in a worker process. Close it, or use it as an async context manager.

    Spawned processes import the main module: a script that makes workers needs `if __name__ == "__main__":`.

    Args:
        function: must pickle; each worker unpickles it once, when it starts. Arguments and results must pickle too.
        most: largest number of processes, and of calls at a time; by default `default_most()`. One is started
            at once, another whenever a call has waited `PATIENCE` seconds for its turn.
        time_limit: seconds a call may run; None for no limit. On Linux no process that a call starts gets much more
            processor time than that either, even after the call has ended.
        memory_limit: bytes of address space that calls may take in one worker in addition to the memory after loading
            `function` (Linux only); a call that wants more gets a MemoryError.
        keep_env: variables that the function needs although their names look like secrets (`OPENAI_API_KEY`).

    Raises:
        ValueError: a limit makes no sense.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        most: int | None = None,
        time_limit: float | None = 30.0,
        memory_limit: int | None = None,
        keep_env: Sequence[str] = (),
    ) -> None:
        if most is not None and most < 1:
            raise ValueError(f"most = {most}: at least one process must score")
        if time_limit is not None and time_limit <= 0:
            raise ValueError(f"time_limit = {time_limit}: must be positive seconds, or None for no limit")
        if memory_limit is not None and (memory_limit < 1 or not STATM.exists()):
            raise ValueError(f"memory_limit = {memory_limit}: must be positive bytes, and needs Linux")
        self.most = default_most() if most is None else most
        self.time_limit = time_limit
        # The function travels as bytes, so that a worker's environment is set before its modules are imported.
        self._load = pickle.dumps(partial(pickle.loads, pickle.dumps(function)))
        self._limits = WorkerLimits(
            cpu_seconds=time_limit if STATM.exists() else None, memory_bytes=memory_limit, keep_env=tuple(keep_env)
        )
        self._workers: set[Worker] = set()
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        self._turns: set[asyncio.Future[Worker]] = set()
        self._closed = False
        self._newest: Worker
        self._idle.put_nowait(self._start())

    @property
    def processes(self) -> int:
        """Workers that there are by now."""
        return len(self._workers)

    @property
    def waiting(self) -> int:
        """Calls that wait for a worker."""
        return len(self._turns)

    def _start(self) -> Worker:
        worker = self._newest = Worker(self._load, self._limits)
        self._workers.add(worker)
        return worker

    def _idle_once_loaded(self, worker: Worker) -> None:
        """Give a waiting call the first worker that is ready, not a worker that still imports."""
        loop = asyncio.get_running_loop()

        def give(_: object) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._idle.put_nowait, worker)

        worker.loaded.add_done_callback(give)

    async def __call__(self, *args: Any) -> Any:
        """Return the function's result.

        Raises:
            TimeoutError: the call ran past the time limit.
            WorkerDied: the worker process ended.
            RuntimeError: the workers are closed.
            Exception: what the function raised, with the worker's traceback as a note.
        """
        if self._closed:
            raise RuntimeError("these reward workers are closed")
        worker = await self._turn()
        if self._closed:  # while the call waited its turn
            raise RuntimeError("these reward workers are closed")
        if not worker.alive:  # its process died between calls
            worker = self._replacement(worker)
        try:
            # Outside the time limit, which starts with the call. Shielded, because wrap_future passes a cancellation on
            # to `worker.loaded`, for which other calls may wait.
            await asyncio.shield(asyncio.wrap_future(worker.loaded))
            async with time_limit(self.time_limit):
                return await worker.call(*args)
        except LateError:
            raise TimeoutError(
                f"the reward function ran past its time limit of {self.time_limit:g} s; its process was replaced"
            ) from None
        finally:
            if worker.alive:
                self._idle.put_nowait(worker)
            elif not self._closed:
                # The process died, or `Worker.call` killed it because the call was cancelled or late.
                self._idle_once_loaded(self._replacement(worker))

    async def _turn(self) -> Worker:
        """Return a worker that is not busy; every `PATIENCE` seconds until there is one, start another."""
        turn = asyncio.ensure_future(self._idle.get())
        self._turns.add(turn)
        try:
            while not (await asyncio.wait((turn,), timeout=PATIENCE))[0]:
                # One at a time: a worker that still imports may soon take the waiting call.
                if len(self._workers) < self.most and self._newest.loaded.done():
                    self._idle_once_loaded(self._start())
            return turn.result()
        except asyncio.CancelledError:
            # A worker arrived together with the cancellation: without this it would never be idle again.
            if not turn.cancel() and not turn.cancelled():
                self._idle.put_nowait(turn.result())
            raise
        finally:
            self._turns.discard(turn)

    def _replacement(self, worker: Worker) -> Worker:
        self._workers.discard(worker)
        return self._start()

    async def close(self) -> None:
        """Stop the workers at once; calls in progress are cancelled."""
        self._closed = True
        for turn in list(self._turns):
            turn.cancel()
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.ended() for worker in self._workers))

    async def __aenter__(self) -> RewardWorkers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def default_most() -> int:
    """Return the default limit of workers: more than the machine has cores, since rewards that take long often wait."""
    return min(32, (os.cpu_count() or 1) + 4)
