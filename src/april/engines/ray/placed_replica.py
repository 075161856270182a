"""Base of replicas on a cluster: how they are placed on a node, and placed again.

Invariant: a replica stays on its node as long as its actor can restart there, and is moved to another node otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.head import release


class PlacedReplica:
    """Base of replicas whose work is done by an actor; `_open` connects to a new life of it.

    Args:
        place: returns the former placement if its actor works, or else a new one.
        opened: called when the replica is ready for weights.
    """

    def __init__(
        self,
        name: str,
        place: Callable[[str, ActorPlacement | None], Awaitable[ActorPlacement]],
        opened: Callable[[], None],
    ) -> None:
        self.name = name
        self.placement: ActorPlacement | None = None
        self._place = place
        self._opened = opened
        self._life = 0
        self._opening: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """Return the address of its node."""
        return self.placement.node.address if self.placement is not None else ""

    async def refresh(self) -> None:
        """Begin a new life. If cancelled and called again, it waits for the same model to load."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._begin(), name=f"open {self.name}")
        opening = self._opening
        try:
            await asyncio.shield(opening)
        finally:
            if opening.done():
                self._opening = None

    async def _begin(self) -> None:
        self.placement = await self._place(self.name, self.placement)
        self._life += 1
        await self._open(self.placement, await self.placement.open(self._life))
        self._opened()

    async def _open(self, placement: ActorPlacement, answer: Any) -> None:
        """Connect to the life that the actor of `placement` has begun; `answer` is the result of its `open`."""
        raise NotImplementedError

    async def _leave(self) -> None:
        """Release its placement."""
        if self._opening is not None:
            self._opening.cancel()
        if self.placement is not None:
            await release(self.placement.end)
