"""The boundary between april and code that a user gives: reward functions, environments, tools, generators, filters.

Invariants:
- user code fails with an Exception, whatever it raises. SystemExit ends no process, CancelledError and GeneratorExit
  end no task, StopIteration ends no iteration;
- Ctrl-C (KeyboardInterrupt) and the cancellation of a task by april pass through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from types import TracebackType
from typing import Any

from april.rollout.json_types import encodable

logger = logging.getLogger(__name__)

CLEANUP_SECONDS = 10.0
"""Seconds that user code may take to clean up once its task is cancelled."""


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
