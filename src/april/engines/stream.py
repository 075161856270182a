"""An engine made of one async generator per sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from april.engines.chunk_queue import ChunkQueue
from april.rollout.engine import Capacity, Chunk, make_chunk
from april.rollout.sampling import FinishReason
from april.rollout.trajectory import Sample

Tokens: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Token ids, and the log-probability in nats with which each was drawn."""


class StreamEngine:
    """An engine made of one async generator per sample: `generate(sample)` yields `(token_ids, logprobs)`.

    The shortest way to put an inference engine of your own behind the scheduler. `generate` goes on from
    `sample.prompt_ids` and `sample.response_ids`; it is cancelled to interrupt a sample, and what it yielded before is
    never lost. To return is to stop (`FinishReason.STOP`); a response that has used up its budget or the context ends
    by itself (`FinishReason.LENGTH`, unless its last token is a stop token). Whatever else ends a response early must
    raise.

    Args:
        generate: an exception it raises is a failed request, which the scheduler tries again from the last token.
        capacity: what the engine can hold. At most `capacity.slots` generators run at a time.
        update_weights: called with (version, weights) when the scheduler hands new weights over.
        backlog: chunks kept for a slow reader before generators have to wait.
    """

    def __init__(
        self,
        generate: Callable[[Sample], AsyncIterator[Tokens]],
        capacity: Capacity,
        update_weights: Callable[[int, Any], Awaitable[None]] | None = None,
        backlog: int = 4096,
    ) -> None:
        self.capacity = capacity
        self.version = 0
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
        """Queue what `generate` yields, with the sample's name, the version and, at the end, the finish reason."""
        id, put, queue = sample.id, self._queue.put, self._queue
        async with self._slots:
            self.running += 1
            left = sample.room(self.capacity.context_length)
            try:
                async for token_ids, logprobs in self._generate(sample):
                    left -= len(token_ids)
                    if left <= 0 and token_ids:
                        stopped = token_ids[-1] in sample.sampling.stop_token_ids
                        finish = FinishReason.STOP if stopped else FinishReason.LENGTH
                        put(Chunk(id, token_ids, logprobs, self.version, finish))
                        return
                    put(make_chunk((id, token_ids, logprobs, self.version, None, None, False)))
                    if queue.full:
                        await queue.space()
                put(Chunk(id, (), (), self.version, FinishReason.STOP))
            except Exception as error:
                put(Chunk(id, (), (), self.version, error=f"{type(error).__name__}: {error}"))
            finally:
                self.running -= 1
                if self._tasks.get(id) is asyncio.current_task():
                    del self._tasks[id]

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._tasks:
            await self._queue.ready()
        return self._queue.take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        tasks = {id: task for id, task in self._tasks.items() if named is None or id in named}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for id in tasks:
            self._tasks.pop(id, None)  # it is still there if it was cancelled before it began
        self._queue.wake()
        return self._queue.take(named)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        if self._update is not None:
            await self._update(version, weights)
        self.version = version

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Nothing is held between requests."""

    async def close(self) -> None:
        await self.interrupt()
