"""An embedded engine in an actor on a node.

Invariant: it answers `ping` while the engine loads, computes or takes up weights, as long as its process and its node
run.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from april.engines.embedded.settings import EmbeddedSettings
from april.engines.ray.actor_channel import ChannelActor
from april.rollout.engine import Capacity

if TYPE_CHECKING:
    from april.engines.embedded.engine import EmbeddedEngine


class EngineActor(ChannelActor):
    """Serves the engine that `settings` describe, which is loaded with its first life."""

    def __init__(self, settings: EmbeddedSettings) -> None:
        super().__init__()
        self._settings = settings
        self._engine: EmbeddedEngine | None = None
        self._loading = threading.Lock()

    async def ping(self) -> int:
        """Return the life that it is in."""
        return self._life

    async def open(self, life: int) -> Capacity:
        """Begin a life with an empty engine, and return the capacity."""
        engine = await asyncio.to_thread(self._load)
        await self._serve(engine, life)
        return engine.capacity

    def _load(self) -> EmbeddedEngine:
        with self._loading:
            if self._engine is None:
                self._engine = self._settings.load()
            return self._engine
