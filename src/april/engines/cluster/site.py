"""A place on a cluster for one engine: the resources that are kept for it on a node, and the actor that works there.

Invariant: resources are kept as long as the site is there, also while its actor is started again after a crash.
"""

from __future__ import annotations

from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from april.engines.cluster.actor import PINGS, EngineActor
from april.engines.cluster.link import ping
from april.engines.cluster.placement import Demand
from april.engines.embedded.host import EmbeddedSettings


class Site:
    """Made on node `node`; Ray starts the actor there, and again when it crashes. It ends with the run, however that
    ends, since the run's process owns it."""

    def __init__(self, node: str, settings: EmbeddedSettings, demand: Demand, name: str) -> None:
        self.node = node
        bundle = {"CPU": demand.cpus, **({"GPU": demand.gpus} if demand.gpus else {})}
        self.group: PlacementGroup = placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node}])
        remote = ray.remote(concurrency_groups={PINGS: 1})(EngineActor)
        self.actor: ActorHandle = remote.options(
            name=f"{name} {self.group.id.hex()[:8]}",
            num_cpus=demand.cpus,
            num_gpus=demand.gpus,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, 0),
        ).remote(settings)
        self._answered = False

    async def alive(self) -> bool:
        """Whether it works, or is being started by Ray: not so if it is hung, or Ray has given it up."""
        try:
            await ping(self.actor)
            self._answered = True
        except ActorDiedError:
            return False
        except RayError:
            self._answered = False  # Ray starts it again
        except TimeoutError:
            return not self._answered
        return True

    def wait(self, seconds: float) -> None:
        """Until its resources are reserved, but not longer than that."""
        ray.wait([self.group.ready()], timeout=seconds)

    def end(self) -> None:
        """Give everything back."""
        with suppress(RayError, ValueError):
            ray.kill(self.actor)
        with suppress(RayError, ValueError):
            remove_placement_group(self.group)
