"""Remote procedure calls over a channel.

Invariant: every call ends, with its result or with an error once the server is gone or has left the call unanswered for
too long. A server that leaves a call unanswered counts as hung, also if the caller has been cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from april.rollout.engine import EngineError

UNREAD = 1.0
"""Seconds after a time limit for reading data that arrived while this process's event loop was blocked."""


class RpcClient:
    """Calls that the server has not answered yet.

    Args:
        send: sends a message to the server.
        on_hang: called with the reason when the server has left a call unanswered for too long.
    """

    def __init__(self, send: Callable[[Any], None], on_hang: Callable[[str], None]) -> None:
        self._send = send
        self._on_hang = on_hang
        self._pending: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle]] = {}
        self._numbers = itertools.count()

    async def call(self, method: str, *arguments: Any, limit: float) -> Any:
        """Call a method of the server and return its result.

        Args:
            limit: seconds after which a server that has not answered counts as hung.

        Raises:
            EngineError: the call failed, or the server is gone; the message gives the reason.
        """
        loop = asyncio.get_running_loop()
        number, result = next(self._numbers), loop.create_future()
        reason = f"hung: it left {method!r} unanswered for {limit:g} s"
        self._send(("call", number, method, arguments))  # first: a call that cannot be sent is not pending
        self._pending[number] = result, loop.call_later(limit, self._overdue, number, reason)
        return await result

    def _overdue(self, number: int, reason: str) -> None:
        # After the event loop was blocked, overdue timers run before the answer has been read from the socket.
        result, _ = self._pending[number]
        self._pending[number] = result, asyncio.get_running_loop().call_later(UNREAD, self._on_hang, reason)

    def answered(self, number: int, error: str | None, value: Any) -> None:
        """End a call with the server's answer."""
        if number in self._pending:
            result, timer = self._pending.pop(number)
            timer.cancel()
            if result.done():  # the caller was cancelled
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(EngineError(error))

    def fail(self, reason: str) -> None:
        """End all calls: the server is gone."""
        pending, self._pending = self._pending, {}
        for result, timer in pending.values():
            timer.cancel()
            if not result.done():
                result.set_exception(EngineError(reason))


class RpcServer:
    """Runs the calls of an `RpcClient` concurrently.

    Args:
        send: sends a message to the client.
        handle: awaited with the method and its arguments; its result or its exception is the answer.
    """

    def __init__(self, send: Callable[[Any], None], handle: Callable[..., Awaitable[Any]]) -> None:
        self._send = send
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()

    def called(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        task = asyncio.create_task(self._run(number, method, arguments), name=f"call of {method}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        value = error = None
        try:
            value = await self._handle(method, *arguments)
        except Exception as failure:  # the caller waits for an answer
            error = reason_of(failure)
        self._send(("answer", number, error, value))

    async def close(self) -> None:
        """Cancel the calls that are running."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reason_of(error: BaseException) -> str:
    """Return what went wrong, as a message for people."""
    return str(error) or type(error).__name__
