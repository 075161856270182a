"""Plain functions of the user's, called in threads beside the event loop.

Invariants:
- a function that never returns costs its own time limit, not that of other calls, nor the process its end. No thread
  can be stopped, so it is left behind; once `most` are, no further one is begun;
- a thread works for one call at a time, and is idle from when that has returned: beginning one a call would make the
  event loop wait for each.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from april.rollout.user_code import UserCode

Jobs: TypeAlias = "SimpleQueue[Callable[[], None] | None]"
"""What one thread does next; None ends it."""


class HangingError(Exception):
    """Too many calls hang already."""


class LateError(TimeoutError):
    """A call ran past its time limit. What a function raises of its own stays a plain TimeoutError."""


def time_limit(seconds: float | None) -> AbstractAsyncContextManager[None]:
    """Ends what is awaited inside after `seconds`; None for no limit.

    Raises:
        LateError: it took longer.
    """
    return nullcontext() if seconds is None else _limited(seconds)


@asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise LateError(f"it took more than {seconds:g} s") from None


class Threads:
    """Calls `function(*args)`, each in a thread that nothing else has meanwhile.

    Args:
        most: calls at a time, and calls that may hang before no further one is begun.
        remedy: what to do about functions that hang, for the error.

    Attributes:
        hanging: calls that were left behind and have not returned.
    """

    def __init__(self, most: int, remedy: str) -> None:
        self._most = most
        self._remedy = remedy
        self._free = asyncio.Semaphore(most)
        self._runs: set[asyncio.Task[Any]] = set()
        self._idle: list[Jobs] = []
        weakref.finalize(self, _end, self._idle)
        self.hanging = 0

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None) -> Any:
        """What the function returns, awaited if it can be. If this is cancelled, the function runs on, and counts among
        the calls at a time until it ends.

        Raises:
            LateError: it took more than `timeout` seconds; the wait for other calls to end does not count.
            HangingError: `most` calls hang.
        """
        await self._free.acquire()
        run = asyncio.create_task(self._run(function, args, timeout))
        self._runs.add(run)
        run.add_done_callback(self._ended)
        value = await asyncio.shield(run)
        if inspect.isawaitable(value):
            async with time_limit(timeout):
                with UserCode():
                    value = await value
        return value

    def _ended(self, run: asyncio.Task[Any]) -> None:
        self._runs.discard(run)
        if not run.cancelled():
            run.exception()  # it has been seen, also where the call was cancelled and nobody asks

    async def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None) -> Any:
        try:
            if self.hanging >= self._most:
                raise HangingError(f"{self._most} calls hang already: {self._remedy}")
            async with time_limit(timeout):
                return await self._in_a_thread(function, args)
        finally:
            self._free.release()

    async def _in_a_thread(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        jobs = self._idle.pop() if self._idle else _begin()

        def settle(value: Any, error: BaseException | None) -> None:
            self._idle.append(jobs)
            if outcome.cancelled():
                self.hanging -= 1
            elif error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(value)

        def work() -> None:
            value: Any = None
            error: BaseException | None = None
            try:
                with UserCode():
                    value = function(*args)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(settle, value, error)

        jobs.put(work)
        try:
            return await outcome
        except asyncio.CancelledError:
            self.hanging += outcome.cancelled()
            raise


def _begin() -> Jobs:
    """A thread that waits for what to do."""
    jobs: Jobs = SimpleQueue()

    def serve() -> None:
        while (job := jobs.get()) is not None:
            job()
            del job  # it holds on to whoever called

    threading.Thread(target=serve, name="user's function", daemon=True).start()
    return jobs


def _end(idle: list[Jobs]) -> None:
    for jobs in idle:
        jobs.put(None)
