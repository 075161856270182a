"""An event loop for callers that are not asynchronous.

Invariants:
- every coroutine given to one `EventLoop` runs on one thread, so an engine is made, used and closed on the same loop;
- `run` returns or raises only when its coroutine has ended: on Ctrl-C it cancels the coroutine and waits for its
  cleanup.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class EventLoop:
    """A thread that runs an event loop until `close`. It works where a loop runs already, as in a notebook.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str = "april") -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}

    def _serve(self) -> None:
        while not self._closing:
            with suppress(SystemExit):  # raised in a task that user code made; it would end the loop for all others
                self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what `coroutine` returns, or raise its exception."""
        assert threading.current_thread() is not self._thread, "run would wait for itself: await the coroutine instead"
        outcome: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._start, coroutine, outcome)
            return outcome.result()
        finally:
            if not outcome.done():  # also if Ctrl-C came before it began
                self._loop.call_soon_threadsafe(self._cancel, outcome)
                wait([outcome])

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Return a future of the result of `coroutine`; cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _start(self, coroutine: Coroutine[Any, Any, T], outcome: Future[T]) -> None:
        task = self._tasks[outcome] = self._loop.create_task(coroutine)
        task.add_done_callback(lambda task: self._settle(task, outcome))

    def _cancel(self, outcome: Future[Any]) -> None:
        if outcome in self._tasks:
            self._tasks[outcome].cancel()
        elif not outcome.done():
            # Ctrl-C came before `_start` was scheduled: there is no task that could settle the outcome.
            outcome.set_exception(asyncio.CancelledError())

    def _settle(self, task: asyncio.Task[T], outcome: Future[T]) -> None:
        del self._tasks[outcome]
        if task.cancelled():
            outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def close(self) -> None:
        """Cancel what still runs, stop the loop and wait for its thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
