"""Calls to a part of april that works elsewhere, and their answers, as messages over whatever leads there.

Invariant: every call ends, with its answer, or with an error once the other end is gone or has left it unanswered for
too long; an end that leaves a call unanswered counts as hung, also if nobody waits for the answer any more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from april.rollout.engine import EngineError


class Calls:
    """The calls of one end that the other has not answered yet.

    Args:
        send: takes a message to the other end.
        hung: called with the reason when a call has been left unanswered for too long; it is to end the other end.
    """

    def __init__(self, send: Callable[[Any], None], hung: Callable[[str], None]) -> None:
        self._send = send
        self._hung = hung
        self._open: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    async def call(self, what: str, *arguments: Any, limit: float) -> Any:
        """Have something done, and return what is answered.

        Args:
            limit: seconds until an end that has not answered counts as hung.

        Raises:
            EngineError: it failed, or the other end is gone; the message says why.
        """
        loop = asyncio.get_running_loop()
        number, answer = next(self._numbers), loop.create_future()
        reason = f"hung: it left {what!r} unanswered for {limit:g} s"
        self._open[number] = answer, loop.call_later(limit, self._hung, reason)
        self._send(("call", number, what, arguments))
        return await answer

    def answered(self, number: int, error: str | None, value: Any) -> None:
        if number in self._open:
            answer, timer = self._open.pop(number)
            timer.cancel()
            if answer.done():  # whoever asked was cancelled
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(EngineError(error))

    def fail(self, reason: str) -> None:
        """The other end is gone: nothing is answered any more."""
        calls, self._open = self._open, {}
        for answer, timer in calls.values():
            timer.cancel()
            if not answer.done():
                answer.set_exception(EngineError(reason))


class Answers:
    """The other end of `Calls`.

    Args:
        send: takes a message to the end that calls.
        do: awaited with what each call asks for; what it returns, or raises, is the answer.
    """

    def __init__(self, send: Callable[[Any], None], do: Callable[..., Awaitable[Any]]) -> None:
        self._send = send
        self._do = do
        self._tasks: set[asyncio.Task[None]] = set()

    def asked(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        task = asyncio.create_task(self._answer(number, what, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        value = error = None
        try:
            value = await self._do(what, *arguments)
        except Exception as failure:  # whoever asked waits for an answer
            error = str(failure) or type(failure).__name__
        self._send(("done", number, error, value))
