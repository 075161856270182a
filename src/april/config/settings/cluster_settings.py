"""Settings of engines, ranks, rewards and environments on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.config.ranges import (
    Positive,
)


@dataclass(kw_only=True)
class ClusterSettings:
    """Engines on nodes of a running Ray cluster (docs/distributed.md; needs the extra `cluster`).

    Nodes may die, hang, leave and join during the run. april cluster check RECIPE lists the engines and ranks that fit
    onto each node.

    Args:
        address: Address of the cluster: HOST:PORT of its head, or auto: the cluster in RAY_ADDRESS, as in a Ray job,
            otherwise the cluster that this machine belongs to. Unset: no cluster; the engine runs on this machine.
        replicas: Engines, each with a copy of the policy. auto: all that fit, including nodes that join later.
        cpus_per_replica: CPUs of an engine, all on one node; without GPUs also its number of threads.
        placement: Nodes that get engines: all, as evenly as there is room (spread); all but those that train
            (exclude_trainer); only those that train (trainer_only).
        rewards: Location of worker processes for rewards: the trainer's machine, or all nodes with
            rollout.reward_workers processes each. Their CPUs are not reserved.
        ranks: Location of the training ranks (trainer.processes): the machine of april train (driver), or, for all
            ranks but the first, nodes with room (nodes), each with a GPU if the cluster has any, unless model.device is
            cpu.
        cpus_per_rank: CPUs of a rank on a node.
        environments: Location of environments: worker processes on the trainer's machine, or all nodes with
            environment.workers processes each. Their CPUs are not reserved.
    """

    address: str = ""
    replicas: Positive[int] | Literal["auto"] = "auto"
    cpus_per_replica: Positive[int] = 1
    placement: Literal["spread", "exclude_trainer", "trainer_only"] = "spread"
    rewards: Literal["trainer", "nodes"] = "trainer"
    ranks: Literal["driver", "nodes"] = "driver"
    cpus_per_rank: Positive[int] = 1
    environments: Literal["trainer", "nodes"] = "trainer"

    @property
    def enabled(self) -> bool:
        return bool(self.address)
