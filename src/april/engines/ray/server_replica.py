"""A server on a node of a cluster, as one replica of a pool: driven over HTTP, wherever it is.

Invariant: a node that dies or hangs is detected within `SILENCE` seconds of a health check, a server alone within the
pool's time limit of a health check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ray.exceptions import RayError

from april.engines.ray.actor_channel import SILENCE, ping, reason_of
from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.placed_replica import PlacedReplica
from april.engines.servers.server import ServerEngine
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.wrapped_engine import WrappedEngine


class ServerReplica(PlacedReplica, WrappedEngine):
    """A server that an actor keeps running. `refresh` starts it, and connects to it.

    Args:
        connect: connects to a server by its address.
        capacity: expected capacity, until the server has reported its own.
        place, opened: see `PlacedReplica`.
    """

    engine: ServerEngine

    def __init__(
        self,
        name: str,
        on_update: KVPolicy,
        capacity: Capacity,
        connect: Callable[[str], Awaitable[ServerEngine]],
        place: Callable[[str, ActorPlacement | None], Awaitable[ActorPlacement]],
        opened: Callable[[], None],
    ) -> None:
        PlacedReplica.__init__(self, name, place, opened)
        self.on_update: KVPolicy = on_update
        self._connect = connect
        self._expected = capacity
        self._connected = False

    @property
    def capacity(self) -> Capacity:
        return self.engine.capacity if self._connected else self._expected

    async def _open(self, placement: ActorPlacement, answer: Any) -> None:
        if self._connected and self.engine.url == answer:
            await self.engine.refresh()
            return
        engine = await self._connect(answer)
        if self._connected:
            await self.engine.close()
        self.engine, self._connected = engine, True

    async def check(self) -> None:
        """Check that its node, its actor and its server answer, and that it holds the weights it was last given."""
        if self.placement is None or not self._connected:
            raise EngineError("it has not been started yet")
        try:
            await asyncio.gather(ping(self.placement.actor), self.engine.check())
        except TimeoutError:
            raise EngineError(f"no answer to a heartbeat in {SILENCE:g} s") from None
        except RayError as error:
            raise EngineError(reason_of(error)) from None

    async def abandon(self) -> list[Chunk]:
        return await self.engine.abandon() if self._connected else []

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        if self._connected:
            super().forget(sample_ids)

    async def close(self) -> None:
        if self._connected:
            await self.engine.close()
        await self._leave()
