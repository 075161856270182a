"""Check, before a run starts, which of its ranks and engines fit onto a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from april.engines.ray.actor_channel import reason_of
from april.engines.ray.cluster import EngineSpec
from april.engines.ray.node_requirements import NodeRequirements
from april.engines.ray.nodes import nodes_now
from april.engines.ray.placement import Demand, Node, allowed, pack, place, without
from april.rollout.patience import patient_timeout

LOOK = 60.0
"""Seconds that a node may take to answer; it starts a process first."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The ranks and engines that a node gets, and the reasons why it gets no more.

    Args:
        environments: what keeps it from having environments, if it shall have some.
    """

    node: Node
    ranks: int
    engines: int
    problems: list[str]
    environments: str = ""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The trainer's ranks that go to nodes."""

    count: int
    demand: Demand
    requirements: NodeRequirements
    engine_cpus: int = 0
    """CPUs that a node keeps free for engines, for each of its ranks."""

    @property
    def room(self) -> Demand:
        """Free resources of a node that a rank takes."""
        return self.demand.plus(self.engine_cpus)


def _missing(requirements: NodeRequirements) -> str:
    return requirements.missing()


async def check(
    spec: EngineSpec, home: str, weights: int, ranks: RankSpec | None = None, environment: bytes | None = None
) -> list[NodeReport]:
    """Return a report for each node.

    Args:
        home: the trainer's node.
        weights: bytes of one version's weights in the type that engines compute in.
        ranks: which get room before engines do.
        environment: of `NodeRequirements`, if all nodes shall have environments.
    """
    nodes = await asyncio.to_thread(nodes_now)
    unfit: dict[str, str] = {}
    training = {home}
    with_ranks: list[str] = []
    left = nodes
    if ranks is not None:
        unfit = await _problems(ranks.requirements, [node for node in nodes if ranks.room.room(node)])
        with_ranks = pack(nodes, ranks.room, ranks.count, home, {id for id, problem in unfit.items() if problem})
        training |= set(with_ranks)
        left = without(nodes, ranks.demand, with_ranks)
    able = [node for node in left if allowed(node, spec.placement, training) and spec.demand.room(node)]
    problems = await _problems(NodeRequirements(spec.engine.model), able)
    for node in left:
        if node.id in problems and node.store < weights:
            problems[node.id] = problems[node.id] or (
                f"its object store has {node.store / 1e9:.2f} GB free, and the weights take {weights / 1e9:.2f} GB: "
                "start the node with a larger ray start --object-store-memory"
            )
    unable = {} if environment is None else await _problems(NodeRequirements("", environment=environment), nodes)
    avoid = {id for id, problem in problems.items() if problem}
    if spec.places is None:
        placed = place(left, spec.demand, spec.replicas, spec.placement, training, avoid)
    else:
        room = {node.id: spec.demand.room(node) for node in left if node.id not in avoid}
        wanted = Counter(own.node for own in spec.places)
        placed = [id for id, count in wanted.items() for _ in range(min(count, room.get(id, 0)))]
    found = []
    for node, rest in sorted(
        zip(nodes, left, strict=True), key=lambda two: (two[0].id != home, two[0].address, two[0].id)
    ):
        problem = problems.get(node.id) or ""
        if not allowed(node, spec.placement, training):
            problem = f'left out by placement = "{spec.placement}"'
        elif not spec.demand.room(rest):
            problem = f"an engine takes {spec.demand}"
        notes = dict.fromkeys([f"no rank: {unfit[node.id]}" if unfit.get(node.id) else "", problem])
        found.append(
            NodeReport(
                node,
                with_ranks.count(node.id),
                placed.count(node.id),
                [note for note in notes if note],
                unable.get(node.id, ""),
            )
        )
    return found


async def _problems(requirements: NodeRequirements, nodes: Sequence[Node]) -> dict[str, str]:
    """What each of these nodes lacks, by its id; empty if nothing."""
    found = await asyncio.gather(*(_problem(requirements, node) for node in nodes))
    return dict(zip([node.id for node in nodes], found, strict=True))


async def _problem(requirements: NodeRequirements, node: Node) -> str:
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    try:
        async with patient_timeout(LOOK):
            return str(
                await ray.remote(_missing).options(num_cpus=0, scheduling_strategy=strategy).remote(requirements)
            )
    except TimeoutError:
        return f"it does not answer within {LOOK:g} s"
    except RayError as error:
        failed = "april cannot be imported" if requirements.environment is None else "it cannot be made"
        return f"{failed} there: {reason_of(error)}"


def lines_of(findings: list[NodeReport], spec: EngineSpec, home: str, ranks: RankSpec | None = None) -> Iterator[str]:
    """Yield the lines of the report: one for each node, and a verdict."""
    heading = f"{'ranks':>7}" if ranks else ""
    yield f"{'node':<10}{'address':<18}{'CPUs free':>10}{'GPUs free':>11}{heading}{'engines':>9}"
    for found in findings:
        node = found.node
        notes = [*(["the trainer's"] if node.id == home else []), *found.problems]
        notes += [f"no environment: {found.environments}"] if found.environments else []
        training = f"{found.ranks:>7}" if ranks else ""
        row = f"{node.id[:8]:<10}{node.address:<18}{node.cpus:>10g}{node.gpus:>11g}{training}{found.engines:>9}  "
        yield (row + "; ".join(notes)).rstrip()
    if ranks:
        fit = sum(found.ranks for found in findings)
        yield f"{fit} of {ranks.count} ranks fit, each with {ranks.room}, beside the first one, which is here"
        if fit < ranks.count:
            yield f"add nodes for {ranks.count - fit} more ranks, or lower trainer.processes to {1 + fit}"
    placed = sum(found.engines for found in findings)
    if spec.replicas is None:
        yield f"{placed} engines, each with {spec.demand}"
    else:
        yield f"{placed} of {spec.replicas} engines fit, each with {spec.demand}"
    if placed < (spec.replicas or 1):
        wish = "a node" if spec.replicas is None else f"nodes for {spec.replicas - placed} more"
        fewer = "" if not placed else f", or lower cluster.replicas to {placed}"
        less = "engine.gpus_per_replica or cluster.cpus_per_replica" if spec.demand.gpus else "cluster.cpus_per_replica"
        yield f"add {wish} with {spec.demand} free for each, or lower {less}{fewer}"


def missing(findings: list[NodeReport], spec: EngineSpec, ranks: RankSpec | None = None) -> bool:
    """Return whether ranks or engines of the recipe do not fit, or a node cannot host environments."""
    if any(found.environments for found in findings):
        return True
    few = sum(found.engines for found in findings) < (spec.replicas or 1)
    return few or sum(found.ranks for found in findings) < (ranks.count if ranks else 0)
