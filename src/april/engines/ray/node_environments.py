"""Environments on the nodes of a cluster: each lives on one node, from its first call to its last.

Invariants:
- a new environment goes to the node with the fewest; a node that joins gets some;
- an environment whose node dies or hangs is lost (`EnvironmentLost`), and found to be by the call that waits for it, or
  by its next one; whoever runs the episode makes a new one, which goes to another node;
- a call that takes too long costs what it costs on one machine: the process in which the environment lives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from april.engines.ray.node_calls import Function, LostError, NodeCaller, NodeCalls
from april.rollout.environment import CalledEnvironment, Environment, EnvironmentLost


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
