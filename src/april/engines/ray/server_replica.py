"""A server on a node of a cluster, as one replica of a pool: driven over HTTP, wherever it is.

Invariants:
- a node that dies or hangs is detected within `SILENCE` seconds of a health check, a server alone within the pool's
  time limit of a health check;
- a server starts only while its gate is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from ray.exceptions import RayError

from april.engines.device_turns import DeviceTurns
from april.engines.ray.actor_channel import SILENCE, ping, reason_of
from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.placed_replica import PlacedReplica
from april.engines.ray.server_actor import RunningServer
from april.engines.servers.server import ServerEngine
from april.engines.start_gate import StartGate
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.patience import patient_timeout
from april.rollout.wrapped_engine import WrappedEngine

Connect = Callable[[RunningServer], Awaitable[ServerEngine]]


class ServerReplica(PlacedReplica, WrappedEngine):
    """A server that an actor keeps running. `refresh` starts it, and connects to it.

    Args:
        connect: connects to a server.
        capacity: expected capacity, until the server has reported its own.
        place, opened: see `PlacedReplica`.
        gate: when the server may start, if it shares its devices with ranks.
    """

    engine: ServerEngine

    def __init__(
        self,
        name: str,
        on_update: KVPolicy,
        capacity: Capacity,
        connect: Connect,
        place: Callable[[str, ActorPlacement | None], Awaitable[ActorPlacement]],
        opened: Callable[[], None],
        gate: StartGate,
    ) -> None:
        PlacedReplica.__init__(self, name, place, opened)
        self.on_update: KVPolicy = on_update
        self._connect = connect
        self._gate = gate
        self._expected = capacity
        self._connected = False

    @property
    def capacity(self) -> Capacity:
        return self.engine.capacity if self._connected else self._expected

    @property
    def running(self) -> int:
        return self.engine.running if self._connected else 0

    async def refresh(self) -> None:
        """Start the server, or connect to the one that runs. While the gate is closed, no server is started."""
        started = self._opening is not None and self._opening.done()
        if self._gate.closed and not started:
            if not self._connected:
                raise EngineError("it starts when the trainer is off its devices")
            await self.engine.refresh()
        else:
            await super().refresh()

    async def _begin(self) -> None:
        async with self._gate.start():
            await super()._begin()

    async def _open(self, placement: ActorPlacement, answer: RunningServer) -> None:
        if self._connected and self.engine.url == answer.url:
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

    @property
    def turns(self) -> DeviceTurns:
        return self.engine.turns

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake_weights(self) -> None:
        await self.engine.wake_weights()

    async def wake_kv_cache(self) -> None:
        await self.engine.wake_kv_cache()

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return await self.engine.prompt_logprobs(token_ids)

    async def kill(self) -> None:
        """Kill the server; an actor that does not answer has died with it, or is killed when it is placed again."""
        if self.placement is not None:
            with suppress(RayError, TimeoutError):
                async with patient_timeout(SILENCE):
                    await self.placement.actor.kill.remote()

    async def abandon(self) -> list[Chunk]:
        return await self.engine.abandon() if self._connected else []

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        if self._connected:
            super().forget(sample_ids)

    async def close(self) -> None:
        if self._connected:
            await self.engine.close()
        await self._leave()
