"""Environments on the nodes of a cluster. Each environment lives on one node.

Invariants:
- a new environment is placed on the node with the lowest load, also on nodes that join;
- an environment whose node dies or hangs is lost: the pending call, or the next one, raises `EnvironmentLost`. The
  episode then makes a new environment, on another node;
- a call that exceeds its time limit kills the environment's process, as on one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from april.engines.ray.node_calls import Function, LostError, NodeCaller, NodeCalls
from april.rollout.episodes.environment import CalledEnvironment, Environment, EnvironmentLost


class NodeEnvironments:
    """`environments()` is a new environment, on a node of the cluster that this process is then connected to.

    Args:
        make: called on a node, gives what calls its environments, by number, method and arguments.
    """

    def __init__(self, make: Callable[[], Function]) -> None:
        self.calls = NodeCalls(make)
        self._numbers = itertools.count()

    def __call__(self) -> Environment:
        return NodeEnvironment(self.calls, next(self._numbers))

    def close(self) -> None:
        self.calls.end()


class NodeEnvironment(CalledEnvironment):
    """An environment on a node."""

    def __init__(self, calls: NodeCalls, number: int) -> None:
        self._calls = calls
        self._number = number
        self._caller: NodeCaller | None = None

    async def close(self) -> None:
        caller = self._caller
        if caller is not None and not caller.lost:
            caller.load -= 1
            try:
                await caller.call(self._number, "close", ())
            except LostError as lost:
                await self._calls.lose(caller, lost)

    async def _call(self, method: str, *args: Any) -> Any:
        if self._caller is None:
            self._caller = await self._calls.least_loaded()
            self._caller.load += 1
        caller = self._caller
        if caller.lost:
            raise EnvironmentLost(f"the node at {caller.node.address} is gone", own=False)
        try:
            return await caller.call(self._number, method, args)
        except LostError as lost:
            await self._calls.lose(caller, lost)
            raise EnvironmentLost(f"the node at {caller.node.address} is gone: {lost}") from None
