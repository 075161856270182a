"""Calls of one function on the nodes of a cluster, each on the node with the fewest calls in flight.

Invariants:
- each call ends once, with the function's result or exception; a call whose node dies or hangs is repeated on another
  node, so the function must be idempotent;
- a call that is cancelled here is cancelled on its node;
- a node that joins gets calls at most `LOOK` seconds after the next call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from april.engines.ray.actor_channel import BEAT, PINGS, STARTING, ping, reason_of
from april.engines.ray.head import call_head, release
from april.engines.ray.nodes import alive_nodes, answers
from april.engines.ray.placement import Node
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)

LOOK = 5.0
"""Seconds between two queries of the nodes."""
PATIENCE = 600.0
"""Seconds that a call waits for a node that answers."""

Function = Callable[..., Awaitable[Any]]


class CallActor:
    """Runs the calls of a node; `make` returns the function there."""

    def __init__(self, make: Callable[[], Function]) -> None:
        self._make = make
        self._function: Function | None = None

    async def ping(self) -> int:
        return 0

    async def call(self, *args: Any) -> Any:
        if self._function is None:
            self._function = self._make()
        return await self._function(*args)


class LostError(Exception):
    """The node of a call is gone, or hangs."""


class NodeCaller:
    """Calls on one node.

    Attributes:
        load: calls in flight on the node, plus environments that live there.
        lost: the node is gone or hangs, or the caller was ended.
    """

    def __init__(self, node: Node, make: Callable[[], Function]) -> None:
        self.node = node
        self.load = 0
        self.lost = False
        remote = ray.remote(concurrency_groups={PINGS: 1})(CallActor)
        # `soft=False`: if the node is gone, the call must fail here and be repeated on another node.
        # No CPUs are reserved, because engines may have reserved all of them.
        where = NodeAffinitySchedulingStrategy(node.id, soft=False)
        self._actor = remote.options(num_cpus=0, max_concurrency=1000, scheduling_strategy=where).remote(make)
        self._answered = False
        self._made_at = time.monotonic()

    async def call(self, *args: Any) -> Any:
        """Return the function's result, or raise its exception.

        Raises:
            LostError: the node is gone, or hangs; its other calls end as well.
        """
        called = self._actor.call.remote(*args)
        answer = asyncio.ensure_future(called)
        self.load += 1
        try:
            while not (await asyncio.wait([answer], timeout=BEAT))[0]:
                if not await self._lives() and not answer.done():
                    raise LostError("it does not answer")
            return answer.result()
        except asyncio.CancelledError:
            ray.cancel(called)
            raise
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            self.lost = True
            raise LostError(reason_of(error)) from None
        except LostError:
            self.lost = True
            raise
        finally:
            self.load -= 1
            answer.cancel()

    async def _lives(self) -> bool:
        try:
            await ping(self._actor)
            self._answered = True
        except TimeoutError:
            starting = not self._answered and time.monotonic() - self._made_at < STARTING
            return starting and await asyncio.to_thread(answers, self.node)
        return not self.lost

    def end(self) -> None:
        self.lost = True
        if ray.is_initialized():
            ray.kill(self._actor)


class NodeCalls:
    """`await calls(*args)` is `make()(*args)` on a node of the cluster that this process is then connected to."""

    def __init__(self, make: Callable[[], Function]) -> None:
        self._make = make
        self._callers: dict[str, NodeCaller] = {}
        self._looking = asyncio.Lock()
        self._looked = -LOOK

    @property
    def waiting(self) -> int:
        """Calls that wait for a node; none, since calls queue on their node."""
        return 0

    async def __call__(self, *args: Any) -> Any:
        """The function's result.

        Raises:
            EngineError: no node answers.
            Exception: what the function raised.
        """
        while True:
            caller = await self.least_loaded()
            try:
                return await caller.call(*args)
            except LostError as lost:
                await self.lose(caller, lost)

    async def least_loaded(self) -> NodeCaller:
        """Return the node with the lowest load.

        Raises:
            EngineError: no node answers.
        """
        given_up = time.monotonic() + PATIENCE
        while time.monotonic() < given_up:
            await self._look()
            if callers := [caller for caller in self._callers.values() if not caller.lost]:
                return min(callers, key=lambda caller: caller.load)
            await asyncio.sleep(1.0)
        raise EngineError(f"no node of the cluster has answered for {PATIENCE:g} s")

    async def lose(self, caller: NodeCaller, lost: LostError) -> None:
        """Make no more calls on a node."""
        if self._callers.get(caller.node.id) is caller:  # another one may have taken its place
            del self._callers[caller.node.id]
            log.warning("calls on the node at %s are made elsewhere: %s", caller.node.address, lost)
            await call_head(caller.end)

    async def _look(self) -> None:
        """Update the list of nodes."""
        async with self._looking:
            if time.monotonic() - self._looked < LOOK and self._callers:
                return
            nodes = {node.id: node for node in await alive_nodes()}
            new = [node for node in nodes.values() if node.id not in self._callers]
            able = await asyncio.gather(*(asyncio.to_thread(answers, node) for node in new))
            self._callers |= {n.id: NodeCaller(n, self._make) for n, answer in zip(new, able, strict=True) if answer}
            self._looked = time.monotonic()

    async def close(self) -> None:
        await release(self.end)

    def end(self) -> None:
        for caller in self._callers.values():
            caller.end()
        self._callers.clear()
