"""Which nodes of a cluster get how many engines and ranks. Independent of Ray.

Invariants:
- an engine's or a rank's GPUs and CPUs are all on one node;
- no two engines use the devices of the same rank;
- the same nodes, in any order, get the same engines and ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Placement = Literal["spread", "exclude_trainer", "trainer_only"]
"""Nodes that get engines: all; all but the trainer's; only the trainer's."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node and its free resources."""

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
    """Resources of an engine or a rank."""

    cpus: int
    gpus: int

    def room(self, node: Node) -> int:
        """Return how many fit onto the free resources of a node."""
        each = [(node.cpus, self.cpus), (node.gpus, self.gpus)]
        # Ray's free resources are floats, which may be slightly below a whole number.
        return min(int(free / needed + 1e-6) for free, needed in each if needed)

    def plus(self, cpus: int) -> Demand:
        """Return the demand with more CPUs."""
        return replace(self, cpus=self.cpus + cpus)

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)} and " if self.gpus else ""
        return f"{gpus}{self.cpus} CPU{'s' * (self.cpus != 1)}"


class DevicePlace(NamedTuple):
    """Devices of a rank, or of an engine that uses the devices of ranks in turn with them.

    Args:
        node: id of the node.
        gpus: names of the GPUs in the visibility variables of that node; empty on CPUs.
    """

    node: str
    gpus: tuple[str, ...] = ()


def engine_places(ranks: Iterable[DevicePlace], each: int, count: int | None) -> list[DevicePlace]:
    """Return the places of `count` engines on the devices of ranks, or of all that fit if None; fewer if there is no
    room for all.

    Args:
        ranks: devices of all ranks, in their order.
        each: ranks on one node whose devices one engine uses.
    """
    by_node: dict[str, list[DevicePlace]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)
    taken = [own[i : i + each] for own in by_node.values() for i in range(0, len(own) - each + 1, each)]
    return [DevicePlace(own[0].node, tuple(gpu for rank in own for gpu in rank.gpus)) for own in taken][:count]


def allowed(node: Node, placement: Placement, training: Container[str]) -> bool:
    """Return whether a node may get engines; nodes in `training` have ranks of the trainer."""
    return {"spread": True, "exclude_trainer": node.id not in training, "trainer_only": node.id in training}[placement]


def place(
    nodes: Sequence[Node],
    demand: Demand,
    count: int | None,
    placement: Placement,
    training: Container[str],
    avoid: Container[str] = (),
) -> list[str]:
    """Return the node of each of `count` engines, or of all that fit if None; fewer if there is no room for all.

    Each engine is placed on the node with the fewest engines, on ties on the node with the most room left.

    Args:
        training: nodes that train.
        avoid: nodes that get none.
    """
    room = {n.id: demand.room(n) for n in nodes if allowed(n, placement, training) and n.id not in avoid}
    given = dict.fromkeys(room, 0)
    placed: list[str] = []
    while (count is None or len(placed) < count) and (open_nodes := [id for id in room if given[id] < room[id]]):
        chosen = min(open_nodes, key=lambda id: (given[id], given[id] - room[id], id))
        given[chosen] += 1
        placed.append(chosen)
    return placed


def pack(nodes: Sequence[Node], demand: Demand, count: int, home: str, avoid: Container[str] = ()) -> list[str]:
    """Return the node of each of `count` ranks, neighbours together; fewer if there is no room for all.

    The first rank's node is filled first, then those with the most room.

    Args:
        home: node of the first rank, which is not counted.
        avoid: nodes that get none.
    """
    able = [node for node in nodes if node.id not in avoid]
    able.sort(key=lambda node: (node.id != home, -demand.room(node), node.id))
    return [node.id for node in able for _ in range(demand.room(node))][:count]


def without(nodes: Sequence[Node], demand: Demand, placed: Sequence[str]) -> list[Node]:
    """Return the nodes with `demand` subtracted on each of `placed`."""
    times = Counter(placed)
    return [
        replace(node, cpus=node.cpus - times[node.id] * demand.cpus, gpus=node.gpus - times[node.id] * demand.gpus)
        for node in nodes
    ]
