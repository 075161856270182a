"""One replica of a pool, on a node of a cluster.

Invariants:
- its samples, tokens and weights are of one life of its actor: whatever an actor that was lost still does is not heard;
- it stays where it is while its actor can come back there, and goes to another node when it cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from april.engines.chunk_queue import ChunkQueue
from april.engines.cluster.link import ActorLink, reason_of
from april.engines.cluster.site import Site
from april.engines.cluster.weights import StoredWeights
from april.engines.embedded.remote import RemoteEngine
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy


class ClusterReplica(RemoteEngine):
    """An engine that an actor hosts. `learn` starts it. Weights come as `StoredWeights`.

    Args:
        capacity: what it is expected to hold until it has said so.
        place: gives it a site: the one that it had, or another one if nothing works there any more.
        opened: called when it can be given weights.
    """

    def __init__(
        self,
        name: str,
        on_update: KVPolicy,
        capacity: Capacity,
        place: Callable[[str, Site | None], Awaitable[Site]],
        opened: Callable[[], None],
    ) -> None:
        super().__init__()
        self.name = name
        self.on_update: KVPolicy = on_update
        self.capacity = capacity
        self.site: Site | None = None
        self._place = place
        self._opened = opened
        self._life = 0
        self._opening: asyncio.Task[None] | None = None
        self._down = "it has not been started yet"

    async def check(self) -> None:
        """The link's heartbeat has found out whatever there is to find out."""
        if self._down is not None:
            raise EngineError(self._down)

    async def learn(self) -> None:
        """Begin a new life. It may be cancelled and called again: a model that is being loaded goes on loading."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=f"open {self.name}")
        opening = self._opening
        try:
            await asyncio.shield(opening)
        finally:
            if opening.done():
                self._opening = None

    async def _open(self) -> None:
        before, self.site = self.site, None
        self.site = await self._place(self.name, before)
        self._life += 1
        try:
            capacity = await self.site.actor.open.remote(self._life)
        except RayError as error:
            raise EngineError(reason_of(error)) from None
        self.capacity = Capacity(*capacity)
        await self.abandon()
        self._down = None
        self._link = ActorLink(self.site.actor, self._life, self._received, self._lost)
        self._opened()

    async def abandon(self) -> list[Chunk]:
        self._lost("it was given up")
        chunks = self._take()
        self._in_flight.clear()
        self._queue, self.running = ChunkQueue(), 0
        return chunks

    def _lost(self, reason: str) -> None:
        if self._down is None:
            self._link.close()
        super()._lost(reason)

    def _sent(self, weights: Any) -> StoredWeights:
        if not isinstance(weights, StoredWeights):
            raise ValueError(f"weights = {weights!r}: must be in the cluster's object store")
        return weights

    async def close(self) -> None:
        self._lost("it was closed")
        if self._opening is not None:
            self._opening.cancel()
        if self.site is not None:
            await asyncio.to_thread(self.site.end)
