"""The trainer's end of a link to an engine's actor: messages out in numbered calls, messages in by a long poll, and a
heartbeat.

Invariant: an actor that dies, hangs or cannot be reached is found out within `SILENCE + BEAT` seconds, whatever else it
is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

PINGS = "health"
"""The concurrency group of an actor's `ping`: a thread and an event loop of its own."""
BEAT = 2.0
"""Seconds between two heartbeats."""
SILENCE = 8.0
"""Seconds that a heartbeat may be unanswered."""
STARTING = 120.0
"""Seconds that Ray may take to start an actor's process, before it is taken to hang. A model is loaded later."""


def reason_of(error: BaseException) -> str:
    """What a person is told; Ray's own words run over many lines."""
    match error:
        case ActorUnavailableError():
            return "its process has died, or cannot be reached"
        case ActorDiedError():
            return "its process has died, and Ray does not start it again"
        case RayTaskError(cause=BaseException() as cause):
            return str(cause) or type(cause).__name__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


async def ping(actor: ActorHandle) -> int:
    """The life that an actor is in.

    Raises:
        RayError: it is dead, or cannot be reached.
        TimeoutError: it has not answered for `SILENCE` seconds.
    """
    async with asyncio.timeout(SILENCE):
        life: int = await actor.ping.options(concurrency_group=PINGS).remote()
        return life


class ActorLink:
    """One life of an actor.

    Args:
        received: called with each message that comes.
        lost: called once, with the reason, when nothing will come any more.
    """

    def __init__(
        self, actor: ActorHandle, life: int, received: Callable[[Any], None], lost: Callable[[str], None]
    ) -> None:
        self._actor = actor
        self._life = life
        self._received = received
        self._lost = lost
        self._outgoing: list[Any] = []
        self._number = 0
        self._closed = False
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    def send(self, message: Any) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if not self._closed:
            self._actor.order.remote(self._life, self._number, messages)
            self._number += 1

    async def _listen(self) -> None:
        try:
            while (messages := await self._actor.poll.remote(self._life)) is not None:
                for message in messages:
                    self._received(message)
            self._give_up("it was restarted")
        except RayError as error:
            self._give_up(reason_of(error))

    async def _beat(self) -> None:
        try:
            life = self._life
            while life == self._life:
                await asyncio.sleep(BEAT)
                life = await ping(self._actor)
            self._give_up("it was restarted")
        except TimeoutError:
            self._give_up(f"no answer to a heartbeat in {SILENCE:g} s")
        except RayError as error:
            self._give_up(reason_of(error))

    def _give_up(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._lost(reason)

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
