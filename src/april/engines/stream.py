"""An engine made of one async generator per sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from april.engines.chunk_queue import ChunkQueue
from april.rollout.engine import Capacity, Chunk
from april.rollout.trajectory import Sample


class StreamEngine:
    """An engine made of one async generator per sample: `generate(sample)` yields the chunks of its continuation.

    The shortest way to put an inference engine of your own behind the scheduler. `generate` is cancelled to interrupt
    a sample; chunks it yielded before are never lost.

    Args:
        generate: yields `Chunk`s; the last one carries `finish`. An exception it raises becomes a chunk with `error`.
        capacity: what the engine can hold. At most `capacity.slots` generators run at a time.
        update_weights: called with (version, weights) when the scheduler hands new weights over.
        backlog: chunks kept for a slow reader before generators have to wait.
    """

    def __init__(
        self,
        generate: Callable[[Sample], AsyncIterator[Chunk]],
        capacity: Capacity,
        update_weights: Callable[[int, Any], Awaitable[None]] | None = None,
        backlog: int = 4096,
    ) -> None:
        self.capacity = capacity
        self._generate = generate
        self._update = update_weights
        self._slots = asyncio.Semaphore(capacity.slots)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._queue = ChunkQueue(backlog)
        self.running = 0

    def submit(self, sample: Sample) -> None:
        task = asyncio.create_task(self._run(sample), name=f"generate {sample.id}")
        self._tasks[sample.id] = task

    async def _run(self, sample: Sample) -> None:
        id = sample.id
        async with self._slots:
            self.running += 1
            finished = False
            try:
                async for chunk in self._generate(sample):
                    self._queue.put(chunk)
                    if chunk.finish is not None or chunk.error is not None:
                        finished = True
                        break
                    if self._queue.full:
                        await self._queue.space()
                if not finished:
                    self._queue.put(Chunk(id, (), (), 0, error="the stream ended before the sample was finished"))
            except Exception as error:
                self._queue.put(Chunk(id, (), (), 0, error=f"{type(error).__name__}: {error}"))
            finally:
                self.running -= 1
                if self._tasks.get(id) is asyncio.current_task():
                    del self._tasks[id]

    async def poll(self) -> list[Chunk]:
        if self._tasks:
            await self._queue.ready()
        return self._queue.take()

    async def interrupt(self) -> list[Chunk]:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        return self._queue.take()

    async def update_weights(self, version: int, weights: Any = None) -> None:
        if self._update is not None:
            await self._update(version, weights)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Nothing is held between requests."""

    async def close(self) -> None:
        await self.interrupt()
