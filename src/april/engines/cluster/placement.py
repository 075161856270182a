"""Which nodes of a cluster get how many engines. Nothing here knows of Ray.

Invariants:
- an engine's GPUs and CPUs are all on one node;
- the same nodes, in any order, get the same engines.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

Placement = Literal["spread", "apart", "beside"]
"""Nodes that get engines: all; all but the trainer's; the trainer's alone."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node and what is free on it."""

    id: str
    address: str
    cpus: float
    gpus: float
    store: float = 0.0
    """Bytes of its object store."""
    port: int = 0
    """Where its raylet listens."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine takes."""

    cpus: int
    gpus: int

    def room(self, node: Node) -> int:
        """Engines that fit onto what is free on a node."""
        each = [(node.cpus, self.cpus), (node.gpus, self.gpus)]
        return min(int(free / needed + 1e-6) for free, needed in each if needed)

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)} and " if self.gpus else ""
        return f"{gpus}{self.cpus} CPU{'s' * (self.cpus != 1)}"


def allowed(node: Node, placement: Placement, home: str) -> bool:
    """Whether a node may get engines. `home` is the trainer's."""
    return {"spread": True, "apart": node.id != home, "beside": node.id == home}[placement]


def place(
    nodes: Sequence[Node],
    demand: Demand,
    count: int | None,
    placement: Placement,
    home: str,
    avoid: Container[str] = (),
) -> list[str]:
    """The node of each of `count` engines, of as many as fit if None; fewer where there is no room for all.

    Each goes to the node that has got the fewest, and among those to the one with the most room left.

    Args:
        home: the trainer's node.
        avoid: nodes that get none.
    """
    room = {n.id: demand.room(n) for n in nodes if allowed(n, placement, home) and n.id not in avoid}
    given = dict.fromkeys(room, 0)
    placed: list[str] = []
    while (count is None or len(placed) < count) and (open_nodes := [id for id in room if given[id] < room[id]]):
        chosen = min(open_nodes, key=lambda id: (given[id], given[id] - room[id], id))
        given[chosen] += 1
        placed.append(chosen)
    return placed
