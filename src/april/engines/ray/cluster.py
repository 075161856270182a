"""Engines on a running Ray cluster.

Invariants:
- engines end with the run that started them;
- a node that joins is used within `WATCH` seconds;
- a head that does not answer stops the run within `head.HEAD_SILENCE` seconds; the journal is on disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from april.engines.embedded.settings import EmbeddedSettings
from april.engines.pool import EnginePool
from april.engines.ray.actor_placement import RESERVING, ActorPlacement
from april.engines.ray.embedded_replica import EmbeddedReplica
from april.engines.ray.engine_actor import EngineActor
from april.engines.ray.head import call_head
from april.engines.ray.nodes import ANSWERING, SUSPECT, WATCH, alive_nodes, answers, home
from april.engines.ray.placement import Demand, DevicePlace, Node, Placement, place
from april.engines.ray.server_actor import ServerActor, ServerSettings
from april.engines.ray.server_replica import Connect, ServerReplica
from april.engines.start_gate import StartGate
from april.rollout.engine import Capacity, EngineError

log = logging.getLogger(__name__)

HEALTH = 2.0
"""Seconds between health checks of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The engines of a run.

    Args:
        replicas: number of engines; None: all that fit, also on nodes that join.
        connect: connects to a server, if engines are servers.
        outage_limit: seconds to wait with no engine ready.
        training: further nodes with ranks of the trainer; this process's node is always one.
        places: place of each engine, if engines use the devices of ranks in turn with them; None: engines have devices
            of their own.
        gate: when engines may start.
    """

    engine: EmbeddedSettings | ServerSettings
    demand: Demand
    replicas: int | None
    placement: Placement
    connect: Connect | None = None
    outage_limit: float = 600.0
    training: frozenset[str] = frozenset()
    places: Sequence[DevicePlace] | None = None
    gate: StartGate = field(default_factory=StartGate)


class Cluster:
    """Places the engines of a run on the cluster that this process is connected to."""

    def __init__(self, spec: EngineSpec) -> None:
        self._training = spec.training | {home()}
        self._spec = spec
        self._suspects: dict[str, float] = {}
        self._placing = asyncio.Lock()
        self._names = 0
        self._places: dict[str, DevicePlace] = {}
        """Place of each engine that uses the devices of ranks, by its name."""
        self._pool: EnginePool | None = None

    async def start(self, on_status: Callable[[str], None]) -> EnginePool:
        """Start the engines and return a pool of them.

        Args:
            on_status: called about every second with the engines that are still starting.

        Raises:
            EngineError: no node has room, or an engine cannot be started; the message gives the reason.
        """
        nodes, spec = await alive_nodes(), self._spec
        if spec.places is None:
            placed = place(nodes, spec.demand, spec.replicas, spec.placement, self._training)
        else:
            placed = [own.node for own in spec.places]
            self._require_cpus(nodes, placed)
        if not placed:
            raise EngineError(self._no_room(nodes))
        first = Capacity(spec.engine.max_num_seqs, spec.engine.context_length or 0)
        replicas = [self._replica(first) for _ in placed]
        try:
            async with asyncio.TaskGroup() as group:
                began = time.monotonic()
                opening = [group.create_task(replica.refresh()) for replica in replicas]
                while (left := sum(not task.done() for task in opening)) and not any(
                    task.done() and task.exception() for task in opening
                ):
                    on_status(f"starting {left} of {len(replicas)} engines, {time.monotonic() - began:.0f} s")
                    await asyncio.wait(opening, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
                    await alive_nodes()  # detects a head that hangs during the start
        except BaseException as failed:
            await asyncio.gather(*(replica.close() for replica in replicas))
            if isinstance(failed, ExceptionGroup):
                raise failed.exceptions[0] from None
            raise
        pool = self._pool = EnginePool(replicas, health_interval=HEALTH, patience=spec.outage_limit)
        missing = (spec.replicas or 0) - len(placed)
        if missing > 0:
            log.warning("%d engines wait for nodes: %s", missing, self._no_room(nodes))
        for _ in range(missing):
            pool.add(self._replica(replicas[0].capacity))
        return pool

    def _replica(self, capacity: Capacity) -> EmbeddedReplica | ServerReplica:
        number, self._names = self._names, self._names + 1
        name, on_update = f"engine-{number}", self._spec.engine.on_update
        if self._spec.places is not None:
            self._places[name] = self._spec.places[number]
        if self._spec.connect is not None:
            gate, opened = self._spec.gate, self._opened
            return ServerReplica(name, on_update, capacity, self._spec.connect, self._place_actor, opened, gate)
        return EmbeddedReplica(name, on_update, capacity, self._place_actor, self._opened)

    async def _place_actor(self, name: str, before: ActorPlacement | None) -> ActorPlacement:
        """Return the former placement of an engine if its actor works or restarts, otherwise a new one.

        Raises:
            EngineError: no node has room.
        """
        nodes, spec = await alive_nodes(), self._spec
        if before is not None:
            if before.node.id in {node.id for node in nodes} and await before.alive():
                return before
            await self._give_up(before)
        async with self._placing:  # concurrent placements would count the same resources
            nodes, now = await alive_nodes(), time.monotonic()
            devices = self._places.get(name)
            if devices is not None:
                nodes = [node for node in nodes if node.id == devices.node]
            suspects = {id for id, until in self._suspects.items() if until > now}
            where = spec.demand, 1, spec.placement, self._training
            silent: set[str] = set()
            while True:
                # A node that hung a while ago is better than no node.
                chosen = place(nodes, *where, suspects | silent) or place(nodes, *where, silent)
                if not chosen:
                    raise EngineError(self._no_room(nodes) if not silent else self._silent(nodes, silent))
                node = next(node for node in nodes if node.id == chosen[0])
                if await asyncio.to_thread(answers, node):
                    break
                silent.add(node.id)
                self._suspects[node.id] = now + SUSPECT
            log.info("%s: on node %s at %s", name, node.id[:8], node.address)
            placement = await call_head(ActorPlacement, node, _actor(spec.engine, name, devices), spec.demand, name)
            if not await placement.reserved(RESERVING):
                await self._give_up(placement)
                raise EngineError(f"the node at {node.address} has not reserved {spec.demand} in {RESERVING} s")
            return placement

    async def _give_up(self, placement: ActorPlacement) -> None:
        self._suspects[placement.node.id] = time.monotonic() + SUSPECT
        await call_head(placement.end)

    def _require_cpus(self, nodes: Sequence[Node], placed: Sequence[str]) -> None:
        """Check that the nodes of ranks have CPUs for all engines on them.

        Raises:
            EngineError: one has not.
        """
        for id, count in Counter(placed).items():
            node = next((node for node in nodes if node.id == id), None)
            if node is None or self._spec.demand.room(node) < count:
                where, cpus = (node.address, node.cpus) if node else (id[:8], 0)
                raise EngineError(
                    f"the node at {where} has {cpus:g} CPUs free, and {count} engines beside its ranks take "
                    f"{self._spec.demand} each: start Ray there with more --num-cpus, or lower cluster.cpus_per_replica"
                )

    def _no_room(self, nodes: list[Node]) -> str:
        if self._spec.places is not None:
            return f"the node of its ranks is gone, or has not {self._spec.demand} free"
        where = {
            "spread": "no node",
            "exclude_trainer": "no node but those that train",
            "trainer_only": "no node that trains",
        }
        return f"{where[self._spec.placement]} has {self._spec.demand} free: april cluster check RECIPE says more"

    def _silent(self, nodes: list[Node], silent: set[str]) -> str:
        where = ", ".join(node.address for node in nodes if node.id in silent)
        return f"no other node has room, and {where} does not answer within {ANSWERING:g} s"

    def _opened(self) -> None:
        if self._pool is not None:
            self._pool.wake()

    async def watch(self, pool: EnginePool) -> None:
        """Use nodes that join, until cancelled."""
        known = {node.id for node in await alive_nodes()}
        while True:
            await asyncio.sleep(WATCH)
            try:
                nodes = await alive_nodes()
            except EngineError as error:
                pool.fail(error)
                return
            joined = {node.id for node in nodes} - known
            known |= joined
            if not joined:
                continue
            log.warning("%d node%s joined the cluster", len(joined), "s" * (len(joined) != 1))
            pool.wake()
            if self._spec.replicas is None:
                new = [node for node in nodes if node.id in joined]
                room = len(place(new, self._spec.demand, None, self._spec.placement, self._training))
                for _ in range(room - sum(not member.ready for member in pool.members)):  # lost engines come first
                    pool.add(self._replica(pool.members[0].replica.capacity))


def _actor(engine: EmbeddedSettings | ServerSettings, name: str, devices: DevicePlace | None) -> tuple[type, list[Any]]:
    """Return the actor class that hosts an engine, and its constructor arguments."""
    if not isinstance(engine, ServerSettings):
        return EngineActor, [engine]
    return ServerActor, [replace(engine, gpus=devices.gpus) if devices else engine, name]
