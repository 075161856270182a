"""What runs on a node: an embedded engine in an actor, and the engine's half of its link.

Ray does not keep the order of an actor's async calls, so orders are numbered. A life is what one `open` begins: orders
and polls of an earlier one come to nothing, so a trainer that lost the engine and found it again begins with an empty
one.

Invariant: it answers `ping` while the engine loads, computes or takes up weights, as long as its process and its node
run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from april.engines.embedded.host import EmbeddedSettings, Host

if TYPE_CHECKING:
    from torch import Tensor

    from april.engines.cluster.weights import StoredWeights
    from april.engines.embedded.engine import EmbeddedEngine


class EngineActor:
    """Hosts the engine that `settings` describe, which is loaded with its first life."""

    def __init__(self, settings: EmbeddedSettings) -> None:
        self._settings = settings
        self._engine: EmbeddedEngine | None = None
        self._loading = threading.Lock()
        self._life = 0
        self._generating: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._queue: list[Any] = []
        self._early: dict[int, list[Any]] = {}
        self._next = 0
        self._host: Host

    async def ping(self) -> int:
        """The life that it is in."""
        return self._life

    async def open(self, life: int) -> tuple[int, int, int | None]:
        """Begin a life, and return the capacity: slots, context length and KV tokens."""
        engine = await asyncio.to_thread(self._load)
        if life > self._life:
            self._life = life
            self._arrived.set()  # whoever polls for an earlier one
            if self._generating is not None:
                self._generating.cancel()
                with suppress(asyncio.CancelledError):
                    await self._generating
            await engine.interrupt()
            engine.forget()
            self._queue, self._early, self._next, self._arrived = [], {}, 0, asyncio.Event()
            self._host = Host(engine, self._post, _tensors)
            self._generating = asyncio.create_task(self._generate(self._host, life))
        capacity = engine.capacity
        return capacity.slots, capacity.context_length, capacity.kv_tokens

    def _load(self) -> EmbeddedEngine:
        with self._loading:
            if self._engine is None:
                self._engine = self._settings.load()
            return self._engine

    async def _generate(self, host: Host, life: int) -> None:
        try:
            await host.generate()
        except Exception as error:
            if life == self._life:
                self._post(("failed", str(error) or type(error).__name__))

    def _post(self, message: Any) -> None:
        self._queue.append(message)
        self._arrived.set()

    async def order(self, life: int, number: int, messages: list[Any]) -> None:
        """Take messages of the trainer's half; `number` counts calls from 0 in each life."""
        if life != self._life:
            return
        self._early[number] = messages
        while (batch := self._early.pop(self._next, None)) is not None:
            self._next += 1
            for message in batch:
                self._host.received(message)

    async def poll(self, life: int) -> list[Any] | None:
        """Messages for the trainer's half, once there are any; None if that life is over."""
        while life == self._life and not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        if life != self._life:
            return None
        messages, self._queue = self._queue, []
        return messages


async def _tensors(weights: StoredWeights) -> Iterator[tuple[str, Tensor]]:
    return await weights.tensors()
