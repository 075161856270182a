"""The queue of chunks between an engine and its reader."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from april.engine import Chunk
from april.outbox import Outbox


def chunk(number: int) -> Chunk:
    return Chunk(str(number), [number], [0.0], 0)


@given(st.lists(st.integers(1, 5), max_size=20))
def test_chunks_come_out_once_and_in_order(sizes: list[int]) -> None:
    outbox = Outbox(backlog=3)
    put, taken = 0, []
    for size in sizes:
        for _ in range(size):
            outbox.put(chunk(put))
            put += 1
        assert outbox.full == (size >= 3)
        taken += outbox.take()
        assert not len(outbox)
        assert not outbox.full
    assert [int(each.sample_id) for each in taken] == list(range(put))


async def test_a_writer_waits_for_room_and_a_reader_for_news() -> None:
    outbox = Outbox(backlog=1)
    written = 0

    async def write() -> None:
        nonlocal written
        for number in range(5):
            outbox.put(chunk(number))
            written += 1
            await outbox.room()

    writer = asyncio.create_task(write())
    for number in range(5):
        await outbox.news()
        assert written == number + 1
        assert len(outbox.take()) == 1
    await writer


async def test_nobody_waits_while_it_is_drained() -> None:
    outbox = Outbox(backlog=1)
    outbox.put(chunk(0))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    with outbox.drain():
        await waiting
        outbox.put(chunk(1))
        await outbox.room()
    assert len(outbox.take()) == 2


async def test_a_wake_ends_a_wait_without_a_chunk() -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.news())
    await asyncio.sleep(0)
    outbox.wake()
    await waiting
    assert outbox.take() == []
