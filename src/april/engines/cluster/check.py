"""What of a run fits onto a cluster, and what does not: seen before anything of it is started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from april import __version__
from april.engines.cluster.cluster import Wanted
from april.engines.cluster.link import reason_of
from april.engines.cluster.nodes import nodes_now
from april.engines.cluster.placement import Node, allowed, place

LOOK = 60.0
"""Seconds that a node may take to answer: it starts a process for it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A node, the engines that it gets, and what keeps it from them."""

    node: Node
    engines: int
    problems: list[str]


def _look(model: str) -> tuple[str, bool]:
    """On a node: the version of april there, and whether the model is there, if it is a directory."""
    return __version__, not Path(model).is_absolute() or Path(model).is_dir()


async def check(wanted: Wanted, home: str, weights: int) -> list[Finding]:
    """A finding for each node.

    Args:
        home: the trainer's node.
        weights: bytes of one version's weights in the type that engines compute in.
    """
    nodes = await asyncio.to_thread(nodes_now)
    able = [node for node in nodes if allowed(node, wanted.placement, home) and wanted.demand.room(node)]
    problems = dict(zip([n.id for n in able], await asyncio.gather(*(_problem(wanted, n) for n in able)), strict=True))
    for node in nodes:
        if node.id in problems and node.store < weights:
            problems[node.id] = problems[node.id] or (
                f"its object store has {node.store / 1e9:.2f} GB free, and the weights take {weights / 1e9:.2f} GB: "
                "start the node with a larger ray start --object-store-memory"
            )
    avoid = {id for id, problem in problems.items() if problem}
    placed = place(nodes, wanted.demand, wanted.replicas, wanted.placement, home, avoid)
    found = []
    for node in sorted(nodes, key=lambda node: (node.id != home, node.address, node.id)):
        problem = problems.get(node.id) or ""
        if not allowed(node, wanted.placement, home):
            problem = f'left out by placement = "{wanted.placement}"'
        elif not wanted.demand.room(node):
            problem = f"an engine takes {wanted.demand}"
        found.append(Finding(node, placed.count(node.id), [problem] if problem else []))
    return found


async def _problem(wanted: Wanted, node: Node) -> str:
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    try:
        async with asyncio.timeout(LOOK):
            version, there = (
                await ray.remote(_look).options(num_cpus=0, scheduling_strategy=strategy).remote(wanted.engine.model)
            )
    except TimeoutError:
        return f"it does not answer within {LOOK:g} s"
    except RayError as error:
        return f"april cannot be imported there: {reason_of(error)}"
    if version != __version__:
        return f"it has april {version}, the trainer's is {__version__}: install the same"
    if not there:
        return f"model.path = {wanted.engine.model!r} is not there: put it on a file system that all nodes share"
    return ""


def lines_of(findings: list[Finding], wanted: Wanted, home: str) -> Iterator[str]:
    """What a person reads: a line for each node, and one that says whether it is enough."""
    yield f"{'node':<10}{'address':<18}{'CPUs free':>10}{'GPUs free':>11}{'engines':>9}"
    for found in findings:
        node = found.node
        notes = [*(["the trainer's"] if node.id == home else []), *found.problems]
        row = f"{node.id[:8]:<10}{node.address:<18}{node.cpus:>10g}{node.gpus:>11g}{found.engines:>9}  "
        yield (row + "; ".join(notes)).rstrip()
    placed = sum(found.engines for found in findings)
    if wanted.replicas is None:
        yield f"{placed} engines, each with {wanted.demand}"
    else:
        yield f"{placed} of {wanted.replicas} engines fit, each with {wanted.demand}"
    if missing(findings, wanted):
        wish = "a node" if wanted.replicas is None else f"nodes for {wanted.replicas - placed} more"
        fewer = "" if not placed else f", or lower cluster.replicas to {placed}"
        yield f"add {wish} with {wanted.demand} free for each, or have each take less{fewer}"


def missing(findings: list[Finding], wanted: Wanted) -> bool:
    """Whether engines that the recipe asks for do not fit."""
    return sum(found.engines for found in findings) < (wanted.replicas or 1)
