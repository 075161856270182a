"""Placement of one engine or rank on a cluster: its reserved resources on a node, and its actor.

Invariants:
- resources stay reserved until `end`, also while the actor is restarted after a crash;
- a hang is detected at any time: while Ray starts the actor, while the actor loads its model, and later.
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
"""Seconds that a node may take to reserve resources. A node that takes longer hangs, or has left."""


class ActorPlacement:
    """Reserves resources on `node`, where Ray starts the actor. The run's process owns both, so both end with the run.

    Args:
        actor: class of the actor, with methods `ping` and `open`, and its constructor arguments.
        again: Ray restarts the actor when it crashes.
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
            # Calls are not idempotent: a call that is lost with its actor must not be repeated.
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, 0),
        ).remote(*arguments)
        self.gpus: tuple[str, ...] = ()
        """GPUs that Ray has assigned to the actor, by their names in visibility variables; set when they are known."""
        self._started_at: float | None = time.monotonic()
        """When Ray began to start the actor; None once the actor has answered."""

    async def alive(self) -> bool:
        """Return whether the actor works or is being started by Ray; False if it hangs, or Ray has given it up."""
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
        """Begin a life of the actor, and return its answer once it has loaded its model.

        Raises:
            EngineError: the actor died, or hangs.
        """
        opening = asyncio.ensure_future(self.actor.open.remote(life))
        try:
            while not (await asyncio.wait([opening], timeout=BEAT))[0]:
                # The answer may arrive while the check runs.
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
        """Wait for the reservation; return whether it was made in time. If cancelled, no thread keeps waiting."""
        until = time.monotonic() + seconds
        while not (found := await call_head(self.group.wait, 1)) and time.monotonic() < until:
            pass
        return bool(found)

    def end(self) -> None:
        """Kill the actor and release its resources."""
        with suppress(RayError, ValueError):
            ray.kill(self.actor)
        with suppress(RayError, ValueError):
            remove_placement_group(self.group)
