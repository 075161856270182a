"""An embedded engine on a node of a cluster, as one replica of a pool.

Invariant: its samples, tokens and weights are of one life of its actor: what an actor that was lost still sends is not
received.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from april.engines.ray.actor_channel import ActorChannel
from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.object_store import StoredWeights
from april.engines.ray.placed_replica import PlacedReplica
from april.engines.remote import RemoteEngine
from april.rollout.engine import Capacity, KVPolicy


class EmbeddedReplica(PlacedReplica, RemoteEngine):
    """An engine that an actor hosts. `refresh` starts it. Weights come as `StoredWeights`.

    Args:
        capacity: expected capacity, until the engine has reported its own.
        place, opened: see `PlacedReplica`.
    """

    def __init__(
        self,
        name: str,
        on_update: KVPolicy,
        capacity: Capacity,
        place: Callable[[str, ActorPlacement | None], Awaitable[ActorPlacement]],
        opened: Callable[[], None],
    ) -> None:
        RemoteEngine.__init__(self)
        PlacedReplica.__init__(self, name, place, opened)
        self.on_update: KVPolicy = on_update
        self.capacity = capacity

    async def _open(self, placement: ActorPlacement, answer: Any) -> None:
        await self.abandon()
        self.capacity = answer
        self._connect(ActorChannel(placement.actor, self._life))

    def _remote_weights(self, weights: Any) -> StoredWeights:
        if not isinstance(weights, StoredWeights):
            raise ValueError(f"weights = {weights!r}: must be in the cluster's object store")
        return weights

    async def close(self) -> None:
        self._disconnect("it was closed")
        await self._leave()
