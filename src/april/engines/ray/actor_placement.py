"""A place on a cluster for one engine or rank: the resources that are kept for it on a node, and the actor that works
there.

Invariants:
- resources are kept as long as the site is there, also while its actor is started again after a crash;
- an actor that hangs is found out whenever it does: while Ray starts it, while it loads its model, and later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from april.engines.ray.actor_channel import BEAT, PINGS, STARTING, ping, reason_of
from april.engines.ray.head import call_head
from april.engines.ray.nodes import answers
from april.engines.ray.placement import Demand, Node
from april.rollout.engine import EngineError

RESERVING = 30
"""Seconds that a node may take to reserve what is asked of it. One that takes longer hangs, or has gone."""


class ActorPlacement:
    """Made on `node`; Ray starts the actor there. It ends with the run, however that ends, since the run's process owns
    it.

    Args:
        actor: its class, which has `ping` and `open`, and what it is made from.
        again: Ray starts it again when it crashes.
    """

    def __init__(
        self, node: Node, actor: tuple[type, Sequence[Any]], demand: Demand, name: str, again: bool = True
    ) -> None:
        self.node = node
        bundle = {"CPU": demand.cpus, **({"GPU": demand.gpus} if demand.gpus else {})}
        self.group: PlacementGroup = placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node.id}])
        kind, arguments = actor
        remote = ray.remote(concurrency_groups={PINGS: 1})(kind)
        self.actor: ActorHandle = remote.options(
            name=f"{name} {self.group.id.hex()[:8]}",
            num_cpus=demand.cpus,
            num_gpus=demand.gpus,
            max_restarts=-1 if again else 0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, 0),
        ).remote(*arguments)
        self._started_at: float | None = time.monotonic()
        """When Ray began to start it; None once it has answered."""

    async def alive(self) -> bool:
        """Whether it works, or is being started by Ray: not so if it hangs, or Ray has given it up."""
        try:
            await ping(self.actor)
            self._started_at = None
            return True
        except ActorDiedError:
            return False
        except RayError:  # Ray starts it again
            self._started_at = self._started_at or time.monotonic()
        except TimeoutError:
            pass
        starting = self._started_at is not None and time.monotonic() - self._started_at < STARTING
        return starting and await asyncio.to_thread(answers, self.node)

    async def open(self, life: int) -> Any:
        """Begin a life of the actor, and return what it answers once it has loaded its model.

        Raises:
            EngineError: it died, or hangs.
        """
        opening = asyncio.ensure_future(self.actor.open.remote(life))
        try:
            while not (await asyncio.wait([opening], timeout=BEAT))[0]:
                if not await self.alive() and not opening.done():
                    raise EngineError("it hangs while it starts")
            answer = opening.result()
        except RayError as error:
            raise EngineError(reason_of(error)) from None
        finally:
            opening.cancel()
        self._started_at = None
        return answer

    async def reserved(self, seconds: float) -> bool:
        """Whether its resources are reserved within so long. Whoever waits may be cancelled: no thread waits on."""
        until = time.monotonic() + seconds
        while not (found := await call_head(self.group.wait, 1)) and time.monotonic() < until:
            pass
        return bool(found)

    def end(self) -> None:
        """Give everything back."""
        with suppress(RayError, ValueError):
            ray.kill(self.actor)
        with suppress(RayError, ValueError):
            remove_placement_group(self.group)
