"""A channel between the trainer and an actor: messages to the actor in numbered calls, messages of the actor by a long
poll, and a heartbeat.

Ray does not keep the order of an actor's async calls, hence the numbers. Each channel belongs to one life of its actor:
calls for an earlier life have no effect.

Invariant: an actor that dies, hangs or cannot be reached closes its channel within `SILENCE + BEAT` seconds.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from april.engines.channel import ChannelClosedError, Inbox, OnClose, OnMessage
from april.engines.engine_server import EngineServer
from april.rollout.patience import patient_timeout

PINGS = "health"
"""The concurrency group of an actor's `ping`: a thread and an event loop of its own."""
BEAT = 2.0
"""Seconds between two heartbeats."""
SILENCE = 15.0
"""Seconds of a running event loop that a heartbeat may be unanswered."""
STARTING = 120.0
"""Seconds that Ray may take to start an actor's process, before it counts as hung. A model is loaded later."""
RESTARTED = "it was restarted"


def reason_of(error: BaseException) -> str:
    """Return what went wrong in one line; Ray's own messages run over many lines."""
    match error:
        case ActorUnavailableError():
            return "its process has died, or cannot be reached"
        case ActorDiedError():
            return "its process has died, and Ray does not start it again"
        case RayTaskError(cause=BaseException() as cause):
            return str(cause) or type(cause).__name__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


async def ping(actor: ActorHandle) -> int:
    """Return the life that an actor is in.

    Raises:
        RayError: it is dead, or cannot be reached.
        TimeoutError: it has not answered for `SILENCE` seconds.
    """
    async with patient_timeout(SILENCE):
        life: int = await actor.ping.options(concurrency_group=PINGS).remote()
        return life


class ActorChannel:
    """The trainer's end of the channel to one life of an actor, which is a `ChannelActor`.

    Args:
        heartbeat: ping the actor, which must have a concurrency group `PINGS`.
    """

    def __init__(self, actor: Any, life: int, heartbeat: bool = True) -> None:
        self._actor = actor
        self._life = life
        self._inbox = Inbox()
        self._unsent: list[Any] = []
        self._number = 0
        self._tasks = [asyncio.create_task(self._collect(), name="messages of an actor")]
        if heartbeat:
            self._tasks.append(asyncio.create_task(self._beat(), name="heartbeat of an actor"))

    def send(self, message: Any) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if self._inbox.closed is None:
            self._actor.channel_send.remote(self._life, self._number, messages)
            self._number += 1

    def listen(self, on_message: OnMessage, on_close: OnClose) -> None:
        self._inbox.listen(on_message, on_close)

    async def _collect(self) -> None:
        reason = RESTARTED
        try:
            while (messages := await self._actor.channel_receive.remote(self._life)) is not None:
                for message in messages:
                    self._inbox.put(message)
        except RayError as error:
            reason = reason_of(error)
        self._close(reason)

    async def _beat(self) -> None:
        reason = RESTARTED
        try:
            life = self._life
            while life == self._life:
                await asyncio.sleep(BEAT)
                life = await ping(self._actor)
        except TimeoutError:
            reason = f"no answer to a heartbeat in {SILENCE:g} s"
        except RayError as error:
            reason = reason_of(error)
        self._close(reason)

    def close(self) -> None:
        self._close("this process has closed the channel")

    def _close(self, reason: str) -> None:
        self._inbox.close(reason)
        for task in self._tasks:
            # One of these tasks may be the caller, which ends by itself.
            if task is not asyncio.current_task():
                task.cancel()


class ActorEnd:
    """The actor's end of the channel of one life."""

    def __init__(self) -> None:
        self._incoming = Inbox()
        self._outgoing = Inbox()
        self._early: dict[int, list[Any]] = {}
        self._next = 0

    def send(self, message: Any) -> None:
        self._outgoing.put(message)

    def listen(self, on_message: OnMessage, on_close: OnClose) -> None:
        self._incoming.listen(on_message, on_close)

    def close(self) -> None:
        for inbox in (self._incoming, self._outgoing):
            inbox.close("the life of the actor is over")

    def accept(self, number: int, messages: list[Any]) -> None:
        """Take the messages of a call; `number` counts calls from 0."""
        self._early[number] = messages
        while (batch := self._early.pop(self._next, None)) is not None:
            self._next += 1
            for message in batch:
                self._incoming.put(message)

    async def collect(self) -> list[Any] | None:
        """Wait for messages for the trainer and return them; None once the channel is closed."""
        try:
            return await self._outgoing.get_all()
        except ChannelClosedError:
            return None


class ChannelActor:
    """Base of actors that serve an engine over an `ActorChannel`. Each life has a new channel, so a trainer that lost
    the actor and found it again receives nothing of the life before."""

    def __init__(self) -> None:
        self._life = 0
        self._end: ActorEnd | None = None
        self._changing_life = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None

    async def _serve(self, engine: Any, life: int) -> None:
        """Begin a life, unless a later one has begun, with an empty `engine`."""
        async with self._changing_life:
            if life <= self._life:
                return
            if self._end is not None:
                self._end.close()
            # Set before the awaits below: calls for the former life have no effect from here on.
            self._life, self._end = life, ActorEnd()
            if self._serving is not None:
                await self._serving  # ends: its channel is closed
            await engine.interrupt()
            engine.forget()
            self._serving = asyncio.create_task(EngineServer(engine, self._end).run(), name=f"life {life}")

    async def channel_send(self, life: int, number: int, messages: list[Any]) -> None:
        """Take messages of the trainer; `number` counts calls from 0 in each life."""
        if life == self._life and self._end is not None:
            self._end.accept(number, messages)

    async def channel_receive(self, life: int) -> list[Any] | None:
        """Wait for messages for the trainer and return them; None if that life is over."""
        return await self._end.collect() if life == self._life and self._end is not None else None
