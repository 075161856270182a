"""Engine wrapper: subclasses override some methods, all others are delegated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from april.rollout.engine import Capacity, Chunk, Engine
from april.rollout.trajectory.sample import Sample


class WrappedEngine:
    """Delegates every method to `engine`; base class of wrappers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def capacity(self) -> Capacity:
        return self.engine.capacity

    @property
    def running(self) -> int:
        return self.engine.running

    def submit(self, sample: Sample) -> None:
        self.engine.submit(sample)

    async def poll(self) -> list[Chunk]:
        return await self.engine.poll()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        return await self.engine.interrupt(sample_ids)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await self.engine.update_weights(version, weights)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self.engine.forget(sample_ids)

    async def close(self) -> None:
        await self.engine.close()
