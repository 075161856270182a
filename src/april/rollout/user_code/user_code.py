"""The boundary between april and user code: reward functions, environments, tools, generators, filters.

Calls of user code on the event loop stand inside `with UserCode():`. `Threads` calls plain functions in threads of this
process, `workers.py` in processes, which can be killed.

Invariants:
- user code fails with an Exception, also if it raises another BaseException: SystemExit ends no process,
  CancelledError and GeneratorExit end no task, StopIteration ends no iteration;
- Ctrl-C (KeyboardInterrupt) and the cancellation of a task by april pass through;
- a function in a thread that never returns exceeds its own time limit, and delays neither other calls nor the end of
  the process. No thread can be stopped, so it is abandoned; once `most` are, no further call begins.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

from april.rollout.json_types import encodable
from april.rollout.patience import patient_timeout

logger = logging.getLogger(__name__)

CLEANUP_SECONDS = 10.0
"""Seconds that user code may take to clean up once its task is cancelled."""


Jobs: TypeAlias = "SimpleQueue[Callable[[], None] | None]"
"""Functions that one thread calls in their order; None ends the thread."""


class UserCodeError(Exception):
    """User code raised an exception that is no failure anywhere else: SystemExit, CancelledError, StopIteration."""


class UserCode:
    """Context manager around a call of user code, in a coroutine or in a thread.

    Raises:
        UserCodeError: the code raised something that is no failure by itself.
    """

    __slots__ = ("_task",)

    def __enter__(self) -> None:
        self._task = _current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._passes(error):
            raise as_failure(error) from error

    def _passes(self, error: BaseException) -> bool:
        if isinstance(error, asyncio.CancelledError):
            # Only `Task.cancel` raises this count; without it, user code has raised the CancelledError itself.
            return self._task is not None and self._task.cancelling() > 0
        if isinstance(error, GeneratorExit):  # the interpreter closes a coroutine from outside its task
            return _current_task() is not self._task
        return isinstance(error, KeyboardInterrupt) or as_failure(error) is error


def as_failure(error: BaseException) -> Exception:
    """`error` itself if it is a failure, otherwise a `UserCodeError` that names it and carries its notes."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    message = _message(error)
    failure = UserCodeError(f"{type(error).__name__}: {message}" if message else type(error).__name__)
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure


def in_one_line(error: Exception) -> str:
    """The kind and the message of an error that user code raised, in one line that UTF-8 can hold."""
    message = _message(error)
    if isinstance(error, UserCodeError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return " ".join(encodable(str(error)).split())
    except Exception as another:  # exceptions of user code have a __str__ of user code
        return f"its message cannot be shown ({type(another).__name__})"


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # in a thread without an event loop
        return None


async def end_tasks(
    tasks: Collection[asyncio.Task[Any]], seconds: float = CLEANUP_SECONDS
) -> Collection[asyncio.Task[Any]]:
    """Cancel tasks that run user code, and wait until they have ended, but at most `seconds`.

    Returns:
        The tasks that have not ended. They are left behind: cancelled once more, and no longer waited for.
    """
    for task in tasks:
        task.cancel()
    if not tasks:
        return ()
    ended, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        logger.warning("%s takes more than %g s to clean up and is left behind", task.get_name(), seconds)
        task.cancel()
        task.add_done_callback(_retrieve)
    for task in ended:
        _retrieve(task)
    return late


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark the exception of a task that was ended as retrieved."""
    if not task.cancelled():
        task.exception()


class HangingError(Exception):
    """Too many calls hang already."""


class LateError(TimeoutError):
    """A call ran past its time limit. What a function raises of its own stays a plain TimeoutError."""


def time_limit(seconds: float | None) -> AbstractAsyncContextManager[None]:
    """End the block after `seconds`; None for no limit.

    Raises:
        LateError: the block took longer.
    """
    return nullcontext() if seconds is None else _limited(seconds)


@asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with patient_timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise LateError(f"it took more than {seconds:g} s") from None


class Threads:
    """Call `function(*args)`, each call in a thread of its own until it returns.

    Args:
        most: calls at a time, and calls that may hang before no further one is begun.
        remedy: remedy for hanging functions, for the error message.

    Attributes:
        hanging: calls that were left behind and have not returned.
    """

    def __init__(self, most: int, remedy: str) -> None:
        self._most = most
        self._remedy = remedy
        self._free = asyncio.Semaphore(most)
        self._runs: set[asyncio.Task[Any]] = set()
        self._idle: list[Jobs] = []
        # The finalizer must not refer to `self`, which would then live forever.
        weakref.finalize(self, _end, self._idle)
        self.hanging = 0

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None) -> Any:
        """Return the function's result, awaited if it is awaitable.

        If this call is cancelled, the function continues, and counts among the calls at a time until it ends.

        Raises:
            LateError: the call took more than `timeout` seconds; the wait for a free thread does not count.
            HangingError: `most` calls hang.
        """
        await self._free.acquire()
        # A task of its own releases the place: a thread of a cancelled call is still at work.
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
            run.exception()  # mark it as retrieved: a cancelled call does not await it

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
            # Nothing is added if the function has just returned; otherwise `settle` subtracts this when it returns.
            self.hanging += outcome.cancelled()
            raise


def _begin() -> Jobs:
    """Start a thread, and return the queue from which it takes functions to call."""
    jobs: Jobs = SimpleQueue()

    def serve() -> None:
        while (job := jobs.get()) is not None:
            job()
            del job  # it holds references to the call

    # A ThreadPoolExecutor would wait for functions that hang as the process exits; daemon threads do not delay it.
    threading.Thread(target=serve, name="user's function", daemon=True).start()
    return jobs


def _end(idle: list[Jobs]) -> None:
    for jobs in idle:
        jobs.put(None)
