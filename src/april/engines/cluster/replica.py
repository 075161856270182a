"""An embedded engine on a node of a cluster, as one replica of a pool.

Invariant: its samples, tokens and weights are of one life of its actor: what an actor that was lost still sends is not
received.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from april.engines.cluster.actor_channel import ActorChannel
from april.engines.cluster.placed import Placed
from april.engines.cluster.site import Site
from april.engines.cluster.weights import StoredWeights
from april.engines.remote import RemoteEngine
from april.rollout.engine import Capacity, KVPolicy


class ClusterReplica(Placed, RemoteEngine):
    """An engine that an actor hosts. `refresh` starts it. Weights come as `StoredWeights`.

    Args:
        capacity: expected capacity, until the engine has reported its own.
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

    async def _open(self, site: Site, answer: Any) -> None:
        await self.abandon()
        self.capacity = answer
        self._connect(ActorChannel(site.actor, self._life))

    def _remote_weights(self, weights: Any) -> StoredWeights:
        if not isinstance(weights, StoredWeights):
            raise ValueError(f"weights = {weights!r}: must be in the cluster's object store")
        return weights

    async def close(self) -> None:
        self._disconnect("it was closed")
        await self._leave()
