"""What replicas on a cluster have in common: a placement, and how they come to one.

Invariant: it stays where it is while its actor can come back there, and goes to another node when it cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from april.engines.ray.actor_placement import ActorPlacement
from april.engines.ray.head import release


class PlacedReplica:
    """The base of replicas whose work an actor does; `open` says what to do with what its new life is opened with.

    Args:
        place: gives it a placement: the one that it had, or another one if nothing works there any more.
        opened: called when it can be given weights.
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
        """The address of its node."""
        return self.placement.node.address if self.placement is not None else ""

    async def refresh(self) -> None:
        """Begin a new life. It may be cancelled and called again: a model that is being loaded goes on loading."""
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
        """Take up the life that `site` has begun; `answer` is what its actor says of it."""
        raise NotImplementedError

    async def _leave(self) -> None:
        """Give its place back, for good."""
        if self._opening is not None:
            self._opening.cancel()
        if self.placement is not None:
            await release(self.placement.end)
