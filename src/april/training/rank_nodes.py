"""The ranks of a run that are on nodes of its cluster: all but the first one, which is where `april train` is.

Invariants:
- they are programs as those that start on one machine are, and report as those do;
- they meet at the address of the first rank's node, on a port that is new at each start;
- none starts before every node has shown that it has what the run needs, the run's directory among it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from april.config.recipe import Recipe
from april.engines.cluster.connection import demand_of, disconnect, join
from april.engines.cluster.head import give_back
from april.engines.cluster.interface import interfaces
from april.engines.cluster.needs import Needs, marked
from april.engines.cluster.node_process import NodeProcess
from april.engines.cluster.nodes import home_address
from april.engines.cluster.placement import Demand
from april.engines.cluster.process_actor import ProcessSettings
from april.engines.cluster.process_sites import ProcessSites
from april.engines.cluster.site import Site
from april.engines.servers.address import reachable
from april.training.rank_protocol import LISTENER, NODES, ON_NODE, RENDEZVOUS, STATUS_FD

MODULE = "april.commands.rank"


class RankNodes:
    """Those of one run, each time that its ranks start. While the block lasts this process is a driver of the cluster.

    Raises:
        EngineError: no cluster answers.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._directory = Path(recipe.reporting.output).absolute()
        self._sites: ProcessSites

    def __enter__(self) -> RankNodes:
        asyncio.run(join(self._recipe.cluster.address))
        self._sites = ProcessSites(demand_of_rank(self._recipe))
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(give_back(disconnect))

    @contextmanager
    def reserved(self, waits: Callable[[str], bool], stopped: Callable[[], bool]) -> Iterator[PlacedRanks]:
        """Nodes with room for all ranks.

        Args:
            waits: told every second why there are none; whether to wait on.
            stopped: asked every second; whether to give up at once.

        Raises:
            EngineError: there are none, and nobody waits, or it was stopped, or the run's directory cannot be written.
        """
        with marked(self._directory) as marker:
            settings = ProcessSettings(
                module=MODULE,
                needs=Needs(model_of(self._recipe), self._directory, marker),
                directory=os.getcwd(),
                line=STATUS_FD,
            )
            sites = asyncio.run(self._sites.take(self._recipe.ranks_on_nodes, settings, waits, stopped))
        address = home_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.create_server((address, 0), family=family, backlog=len(sites)) as listener:
                ranks = PlacedRanks(sites, listener, self._directory / "ranks")
                yield ranks
                for process, site in zip(ranks.processes, sites, strict=False):
                    if process.lost:
                        self._sites.suspect(site.node.id)
        finally:
            asyncio.run(give_back(_end, sites))


class PlacedRanks:
    """The ranks of one start.

    Args:
        sites: of ranks 1 and so on.
        listener: where all meet.
        logs: the folder of theirs.
    """

    def __init__(self, sites: list[Site], listener: socket.socket, logs: Path) -> None:
        self.processes: list[NodeProcess] = []
        self.listener = listener.fileno()
        self._sites = sites
        self._address, port, *_ = listener.getsockname()
        self._url = f"tcp://{reachable(self._address)}:{port}"
        self._logs = logs

    @property
    def of_first(self) -> dict[str, str]:
        """Environment variables of the first rank."""
        nodes = " ".join(sorted({site.node.id for site in self._sites}))
        return {RENDEZVOUS: self._url, LISTENER: str(self.listener), NODES: nodes}

    @property
    def network(self) -> dict[str, str]:
        """Environment variables of the first rank, if the user has not set them."""
        return interfaces(self._address)

    def start(self, number: int, told: str) -> NodeProcess:
        """Start a rank; `told` is what it reads."""
        place = {"RANK": number, "WORLD_SIZE": 1 + len(self._sites), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        environment = {RENDEZVOUS: self._url, ON_NODE: "1"} | {name: str(value) for name, value in place.items()}
        process = NodeProcess(self._sites[number - 1], environment, told, self._logs / f"rank-{number}.log")
        self.processes.append(process)
        return process

    def __str__(self) -> str:
        parts = []
        for address, members in groupby(enumerate(self._sites, 1), lambda member: member[1].node.address):
            first, *_, last = [number for number, _ in members] * 2
            parts.append(
                f"rank{'s' * (first != last)} {first}{f' to {last}' * (first != last)} on the node at {address}"
            )
        return ", ".join(parts)


def _end(sites: list[Site]) -> None:
    for site in sites:
        site.end()


def demand_of_rank(recipe: Recipe) -> Demand:
    """What a rank takes of a node of the cluster that this process is connected to."""
    return demand_of(recipe.cluster.cpus_per_rank, 0 if recipe.model.device == "cpu" else "auto")


def model_of(recipe: Recipe) -> str:
    """The policy that ranks load, as nodes know it: a directory, or a hub name."""
    path = Path(recipe.model.path).expanduser()
    return str(path.absolute()) if path.is_dir() else str(path)
