"""Placements for programs that need one another: all of them, or none.

Invariant: no placement is kept unless every program has one, on a node that meets its requirements.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from april.engines.ray.actor_placement import RESERVING, ActorPlacement
from april.engines.ray.head import call_head, release
from april.engines.ray.nodes import SUSPECT, WATCH, alive_nodes, answers, home
from april.engines.ray.placement import Demand, Node, pack
from april.engines.ray.process_actor import OpenedNode, ProcessActor, ProcessSettings
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)


class ProcessPlacements:
    """Placements of one run; each restart reserves new ones.

    Args:
        demand: resources of each program.
        spare_cpus: CPUs that a node keeps free for each program, in addition to its demand.
    """

    def __init__(self, demand: Demand, spare_cpus: int = 0) -> None:
        self._demand = demand
        self._room = demand.plus(spare_cpus)
        self._suspects: dict[str, float] = {}

    def suspect(self, node: str) -> None:
        """Avoid a node for a while, if there are others."""
        self._suspects[node] = time.monotonic() + SUSPECT

    async def take(
        self,
        count: int,
        settings: ProcessSettings,
        waits: Callable[[str], bool],
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[ActorPlacement]:
        """Return a placement for each of `count` programs, opened.

        Args:
            waits: called every `WATCH` seconds with the reason of the wait; returns whether to keep waiting.
            stopped: called as often, also during reservations; returns whether to give up at once.

        Raises:
            EngineError: there are none and `waits` returned False, or `stopped` returned True.
        """
        taking = asyncio.ensure_future(self._take(count, settings, waits))
        while not (await asyncio.wait([taking], timeout=WATCH))[0]:
            if stopped():
                taking.cancel()
                await asyncio.wait([taking])
                raise EngineError("stopped before the ranks had nodes")
        return taking.result()

    async def _take(self, count: int, settings: ProcessSettings, waits: Callable[[str], bool]) -> list[ActorPlacement]:
        unfit: dict[str, str] = {}
        asked = time.monotonic()
        while True:
            nodes = await self._answering()
            suspects = {id for id, until in self._suspects.items() if until > time.monotonic()}
            where = self._room, count, home()
            placed = pack(nodes, *where, suspects | set(unfit))
            # Use suspects only if the ranks do not fit otherwise.
            if len(placed) < count:
                placed = pack(nodes, *where, unfit)
            if len(placed) == count:
                by_id = {node.id: node for node in nodes}
                if placements := await self._opened([by_id[id] for id in placed], settings, unfit):
                    return placements
            else:
                why = f"{len(placed)} of {count} ranks fit, each with {self._room}"
                why = "; ".join([*unfit.values(), why])
                if not waits(why):
                    raise EngineError(f"{why}: april cluster check RECIPE says more")
                if time.monotonic() - asked > SUSPECT:  # each check starts a process on the node
                    unfit.clear()
                    asked = time.monotonic()
            await asyncio.sleep(WATCH)

    async def _answering(self) -> list[Node]:
        nodes = await alive_nodes()
        able = await asyncio.gather(*(asyncio.to_thread(answers, node) for node in nodes))
        return [node for node, answer in zip(nodes, able, strict=True) if answer]

    async def _opened(
        self, nodes: Sequence[Node], settings: ProcessSettings, unfit: dict[str, str]
    ) -> list[ActorPlacement]:
        """Return placements on these nodes; none if a node is unfit, which is recorded in `unfit`."""
        named, actor = enumerate(nodes, 1), (ProcessActor, [settings])
        placements = await asyncio.gather(
            *(call_head(ActorPlacement, node, actor, self._demand, f"rank-{rank}", False) for rank, node in named)
        )
        # Stands if the checks are cancelled: the placements are released then, too.
        found = ["stopped"]
        try:
            found = await asyncio.gather(*(self._problem(placement) for placement in placements))
        finally:
            if any(found):
                await asyncio.gather(*(release(placement.end) for placement in placements))
        if not any(found):
            return placements
        for placement, problem in zip(placements, found, strict=True):
            if problem:
                unfit[placement.node.id] = f"the node at {placement.node.address}: {problem}"
        return []

    async def _problem(self, placement: ActorPlacement) -> str:
        if not await placement.reserved(RESERVING):
            self.suspect(placement.node.id)
            return f"it has not reserved {self._demand} in {RESERVING} s"
        try:
            opened: OpenedNode = await placement.open(1)
        except EngineError as error:
            self.suspect(placement.node.id)
            return str(error)
        placement.gpus = opened.gpus
        return opened.missing
