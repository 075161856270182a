"""One replica of a pool, on a node of a cluster.

Invariant: its samples, tokens and weights are of one life of its actor: whatever an actor that was lost still does is
not heard.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from april.engines.chunk_queue import ChunkQueue
from april.engines.cluster.link import ActorLink
from april.engines.cluster.placed import Placed
from april.engines.cluster.site import Site
from april.engines.cluster.weights import StoredWeights
from april.engines.embedded.remote import RemoteEngine
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy


class ClusterReplica(Placed, RemoteEngine):
    """An engine that an actor hosts. `refresh` starts it. Weights come as `StoredWeights`.

    Args:
        capacity: what it is expected to hold until it has said so.
        place, opened: see `Placed`.
    """

    def __init__(
        self,
        name: str,
        on_update: KVPolicy,
        capacity: Capacity,
        place: Callable[[str, Site | None], Awaitable[Site]],
        opened: Callable[[], None],
    ) -> None:
        RemoteEngine.__init__(self)
        Placed.__init__(self, name, place, opened)
        self.on_update: KVPolicy = on_update
        self.capacity = capacity
        self._down = "it has not been started yet"

    async def check(self) -> None:
        """The link's heartbeat has found out whatever there is to find out."""
        if self._down is not None:
            raise EngineError(self._down)

    async def _open(self, site: Site, answer: Any) -> None:
        self.capacity = Capacity(*answer)
        await self.abandon()
        self._down = None
        self._link = ActorLink(site.actor, self._life, self._received, self._lost)

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
        await self._leave()
