"""Ranks on nodes of a cluster: all but the first rank, which runs on the machine of `april train`.

Invariants:
- these ranks run the same program, and send the same reports, as ranks on one machine;
- their rendezvous is at the address of the first rank's node, on a new port at each start;
- no rank starts before every node has been checked for the model, the packages and the run's directory.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from april.config.settings.cluster_settings import ClusterSettings
from april.config.settings.model_settings import ModelSettings
from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.driver import demand_of, disconnect, join
from april.engines.ray.head import release
from april.engines.ray.network_interface import interfaces
from april.engines.ray.node_process import NodeProcess
from april.engines.ray.node_requirements import NodeRequirements, marked
from april.engines.ray.nodes import home_address
from april.engines.ray.placement import Demand
from april.engines.ray.process_actor import ProcessSettings
from april.engines.ray.process_placements import ProcessPlacements
from april.engines.servers.address import reachable
from april.training.rank_protocol import LISTENER, NODES, ON_NODE, RENDEZVOUS, STATUS_FD

MODULE = "april.commands.rank"


class RankNodes:
    """Reserves nodes for the ranks of one run, at each start. Inside the block this process is a driver of the cluster.

    Args:
        count: number of ranks on nodes.
        cluster: the cluster, and the demand of a rank.
        model: the policy, which the nodes must have.
        directory: the run's directory, which the nodes must share.
        engine_cpus: CPUs that a node keeps free for engines, for each of its ranks.

    Raises:
        EngineError: no cluster answers.
    """

    def __init__(
        self, count: int, cluster: ClusterSettings, model: ModelSettings, directory: Path, engine_cpus: int = 0
    ) -> None:
        self._count = count
        self._engine_cpus = engine_cpus
        self._cluster = cluster
        self._model = model
        self._directory = directory.absolute()
        self._placements: ProcessPlacements

    def __enter__(self) -> RankNodes:
        asyncio.run(join(self._cluster.address))
        self._placements = ProcessPlacements(demand_of_rank(self._cluster, self._model), self._engine_cpus)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(release(disconnect))

    @contextmanager
    def reserved(self, waits: Callable[[str], bool], stopped: Callable[[], bool]) -> Iterator[PlacedRanks]:
        """Reserve nodes with room for all ranks.

        Args:
            waits: called every second with the reason why nodes are missing; returns whether to keep waiting.
            stopped: called every second; returns whether to give up.

        Raises:
            EngineError: there are no nodes and `waits` returned False, `stopped` returned True, or a node cannot write
                the run's directory.
        """
        with marked(self._directory) as marker:
            settings = ProcessSettings(
                module=MODULE,
                requirements=NodeRequirements(model_of(self._model), self._directory, marker),
                directory=os.getcwd(),
                line=STATUS_FD,
            )
            placements = asyncio.run(self._placements.take(self._count, settings, waits, stopped))
        address = home_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.create_server((address, 0), family=family, backlog=len(placements)) as listener:
                ranks = PlacedRanks(placements, listener, self._directory / "ranks")
                yield ranks
                # The next start avoids nodes whose ranks were lost, if there are others.
                for process, placement in zip(ranks.processes, placements, strict=False):
                    if process.lost:
                        self._placements.suspect(placement.node.id)
        finally:
            asyncio.run(release(_end, placements))


class PlacedRanks:
    """Ranks of one start, and the nodes reserved for them.

    Args:
        placements: placements of ranks 1, 2, …
        listener: listening socket of the rendezvous.
        logs: folder of the ranks' logs.
    """

    def __init__(self, placements: list[ActorPlacement], listener: socket.socket, logs: Path) -> None:
        self.processes: list[NodeProcess] = []
        self.listener = listener.fileno()
        self._placements = placements
        self._address, port, *_ = listener.getsockname()
        self._url = f"tcp://{reachable(self._address)}:{port}"
        self._logs = logs

    @property
    def leader_environment(self) -> dict[str, str]:
        """Environment variables for the first rank."""
        places = " ".join(f"{placement.node.id}={','.join(placement.gpus)}" for placement in self._placements)
        return {RENDEZVOUS: self._url, LISTENER: str(self.listener), NODES: places}

    @property
    def leader_defaults(self) -> dict[str, str]:
        """Defaults of environment variables for the first rank; the user's values take precedence."""
        return interfaces(self._address)

    def start(self, number: int, payload: str) -> NodeProcess:
        """Start a rank; it reads `payload` from its standard input."""
        place = {"RANK": number, "WORLD_SIZE": 1 + len(self._placements), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        environment = {RENDEZVOUS: self._url, ON_NODE: "1"} | {name: str(value) for name, value in place.items()}
        process = NodeProcess(self._placements[number - 1], environment, payload, self._logs / f"rank-{number}.log")
        self.processes.append(process)
        return process

    def __str__(self) -> str:
        parts = []
        for address, members in groupby(enumerate(self._placements, 1), lambda member: member[1].node.address):
            first, *_, last = [number for number, _ in members] * 2
            parts.append(
                f"rank{'s' * (first != last)} {first}{f' to {last}' * (first != last)} on the node at {address}"
            )
        return ", ".join(parts)


def _end(placements: list[ActorPlacement]) -> None:
    for placement in placements:
        placement.end()


def demand_of_rank(cluster: ClusterSettings, model: ModelSettings) -> Demand:
    """Return a rank's demand for CPUs and GPUs; this process must be connected to the cluster."""
    return demand_of(cluster.cpus_per_rank, 0 if model.device == "cpu" else "auto")


def model_of(model: ModelSettings) -> str:
    """Return the policy's absolute path, or its hub name."""
    path = Path(model.path).expanduser()
    return str(path.absolute()) if path.is_dir() else str(path)
