"""An engine made of one async generator per sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from april.engines.chunk_queue import ChunkQueue
from april.engines.fit import require_room
from april.rollout.engine import Capacity, Chunk, Fault, make_chunk
from april.rollout.patience import patient_timeout
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import CLEANUP_SECONDS, UserCode, end_tasks, in_one_line

Tokens: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Token ids, and the log-probability in nats with which each was drawn."""


class StreamEngine:
    """An engine made of one async generator per sample: `generate(sample)` yields `(token_ids, logprobs)`.

    The shortest way to put an inference engine of your own behind the scheduler. `generate` continues from
    `sample.prompt_ids` and `sample.response_ids`; it is cancelled to interrupt a sample, and tokens yielded
    before are never lost. A return finishes the sample (`FinishReason.STOP`), unless the generator was cancelled: then
    the sample stays unfinished. A response that has used up its budget or the context ends by itself
    (`FinishReason.LENGTH`, unless its last token is a stop token). Any other early end must be an exception.

    Args:
        generate: an exception fails the request, which the scheduler retries from the last token. Tokens
            and log-probabilities may be any sequences of numbers: lists, NumPy arrays, tensors.
        capacity: capacity of the engine. At most `capacity.slots` generators run at a time.
        update_weights: called with (version, weights) when the scheduler sends new weights.
        backlog: chunks kept for a slow reader before generators have to wait.
        cleanup_timeout: seconds that a cancelled generator may take to end. Then it is abandoned, and its slot is free.
    """

    def __init__(
        self,
        generate: Callable[[Sample], AsyncIterator[Tokens]],
        capacity: Capacity,
        update_weights: Callable[[int, Any], Awaitable[None]] | None = None,
        backlog: int = 4096,
        cleanup_timeout: float = CLEANUP_SECONDS,
    ) -> None:
        self.capacity = capacity
        self.version = 0
        self._generate = generate
        self._update = update_weights
        self._cleanup_timeout = cleanup_timeout
        self._slots = asyncio.Semaphore(capacity.slots)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        """Tasks that hold a slot."""
        self._queue = ChunkQueue(backlog)

    @property
    def running(self) -> int:
        """Samples that are decoding now."""
        return len(self._running)

    def submit(self, sample: Sample) -> None:
        require_room(sample, self.capacity.context_length, "the engine")
        task = asyncio.create_task(self._run(sample), name=f"generate {sample.id}")
        self._tasks[sample.id] = task

    async def _run(self, sample: Sample) -> None:
        # Outside of the block: a task that is cancelled while it waits holds no slot.
        await self._slots.acquire()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._generated(sample, task)
        except Exception as error:
            # After an interrupt, the sample has no request that could fail.
            if task in self._running and not task.cancelling():
                self._queue.put(Chunk(sample.id, (), (), self.version, error=in_one_line(error)))
        finally:
            self._release(task)
            if self._tasks.get(sample.id) is task:
                del self._tasks[sample.id]

    async def _generated(self, sample: Sample, task: asyncio.Task[None]) -> None:
        """Queue what `generate` yields, with the sample's name, the version and, at the end, the finish reason."""
        id, put, queue, running = sample.id, self._queue.put, self._queue, self._running
        left = sample.room(self.capacity.context_length)
        with UserCode():
            generator = self._generate(sample)
            try:
                async for yielded in generator:
                    if task not in running:  # left behind
                        return
                    token_ids, logprobs = map(_plain, yielded)
                    left -= (count := len(token_ids))
                    if left <= 0 and count:
                        stopped = token_ids[-1] in sample.sampling.stop_token_ids
                        finish = FinishReason.STOP if stopped else FinishReason.LENGTH
                        put(Chunk(id, token_ids, logprobs, self.version, finish))
                        return
                    put(make_chunk((id, token_ids, logprobs, self.version, None, None, Fault.UNKNOWN, None)))
                    # The generator has suppressed the cancellation and yielded again: these tokens are the last.
                    if task.cancelling():
                        return
                    if queue.full:
                        await queue.space()
            finally:
                await self._close(generator)
        if task in running and not task.cancelling():
            put(Chunk(id, (), (), self.version, FinishReason.STOP))

    async def _close(self, generator: Any) -> None:
        """Have a generator that was left before its end clean up."""
        if hasattr(generator, "aclose"):
            with suppress(Exception), UserCode():
                async with patient_timeout(self._cleanup_timeout):
                    await generator.aclose()

    def _release(self, task: asyncio.Task[None]) -> None:
        """Free the slot of a task, once."""
        if task in self._running:
            self._running.remove(task)
            self._slots.release()

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._tasks:
            await self._queue.ready()
        return self._queue.take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        tasks = {id: task for id, task in self._tasks.items() if named is None or id in named}
        for task in await end_tasks(list(tasks.values()), self._cleanup_timeout):
            self._release(task)
        for id in tasks:
            self._tasks.pop(id, None)  # it is still there if it was cancelled before it began
        self._queue.wake()
        return self._queue.take(named)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        if self._update is not None:
            with UserCode():
                await self._update(version, weights)
        self.version = version

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Nothing is held between requests."""

    async def close(self) -> None:
        await self.interrupt()


def _plain(values: Any) -> Sequence[Any]:
    """A sequence of numbers that later changes of a generator's buffers do not reach."""
    plain: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return plain
