"""The queue of chunks between an engine and its reader."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from april.engines.chunk_queue import ChunkQueue
from april.rollout.engine import Chunk


def chunk(number: int) -> Chunk:
    return Chunk(str(number), [number], [0.0], 0)


@given(st.lists(st.integers(1, 5), max_size=20))
def test_chunks_are_returned_once_and_in_order(sizes: list[int]) -> None:
    queue = ChunkQueue(backlog=3)
    put, taken = 0, []
    for size in sizes:
        for _ in range(size):
            queue.put(chunk(put))
            put += 1
        assert queue.full == (size >= 3)
        taken += queue.take()
        assert not len(queue)
        assert not queue.full
    assert [int(each.sample_id) for each in taken] == list(range(put))


async def test_a_writer_waits_for_space_and_a_reader_for_a_chunk() -> None:
    queue = ChunkQueue(backlog=1)
    written = 0

    async def write() -> None:
        nonlocal written
        for number in range(5):
            queue.put(chunk(number))
            written += 1
            await queue.space()

    writer = asyncio.create_task(write())
    for number in range(5):
        await queue.ready()
        assert written == number + 1
        assert len(queue.take()) == 1
    await writer


async def test_drain_lifts_the_bound() -> None:
    queue = ChunkQueue(backlog=1)
    queue.put(chunk(0))
    waiting = asyncio.create_task(queue.space())
    await asyncio.sleep(0)
    assert not waiting.done()
    with queue.drain():
        await waiting
        queue.put(chunk(1))
        await queue.space()
    assert len(queue.take()) == 2


async def test_a_wake_ends_a_wait_without_a_chunk() -> None:
    queue = ChunkQueue()
    waiting = asyncio.create_task(queue.ready())
    await asyncio.sleep(0)
    queue.wake()
    await waiting
    assert queue.take() == []
