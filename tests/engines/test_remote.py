"""A remote engine and its server over a channel in this process: back-pressure, death and defects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from april import Capacity, Chunk, EngineError, Group, Prompt, Sample, SamplingParams
from april.engines.channel import Inbox, OnClose, OnMessage
from april.engines.engine_server import EngineServer
from april.engines.remote import RemoteEngine
from april.engines.stream_engine import StreamEngine, Tokens

WINDOW = 8


class LocalChannel:
    """One end of a pair in this process."""

    def __init__(self, own: Inbox, other: Inbox) -> None:
        self.own, self.other = own, other

    def send(self, message: Any) -> None:
        self.other.put(message)

    def listen(self, on_message: OnMessage, on_close: OnClose) -> None:
        self.own.listen(on_message, on_close)

    def close(self) -> None:
        for inbox in (self.own, self.other):
            inbox.close("the channel was closed")


class Remote(RemoteEngine):
    window = WINDOW

    def connect(self, channel: LocalChannel) -> None:
        self.capacity = Capacity(4, 10**6)
        self._connect(channel)

    def _remote_weights(self, weights: Any) -> None:
        return None


async def endless(sample: Sample) -> AsyncIterator[Tokens]:
    token = sample.length
    while True:
        yield [token], [-1.0]
        token += 1
        await asyncio.sleep(0)


@asynccontextmanager
async def remote(engine: Any) -> AsyncIterator[tuple[Remote, LocalChannel]]:
    here, there = Inbox(), Inbox()
    channel = LocalChannel(here, there)
    serving = asyncio.create_task(EngineServer(engine, LocalChannel(there, here), WINDOW).run())
    client = Remote()
    client.connect(channel)
    try:
        yield client, channel
    finally:
        await client.abandon()
        await serving
        await engine.close()


def some_sample(id: int = 0) -> Sample:
    return Group.start(id, Prompt((4, 5)), 1, SamplingParams(10**5), seed=0).samples[0]


async def turns(count: int = 200) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_engine_waits_for_its_consumer_and_an_interrupt_is_answered_all_the_same() -> None:
    sample = some_sample()
    async with remote(StreamEngine(endless, Capacity(4, 10**6), backlog=4)) as (engine, _):
        engine.submit(sample)
        await turns()
        assert engine.behind
        queued = len(engine._queue)
        await turns()
        assert len(engine._queue) == queued, "the engine sends nothing until chunks are handed out"
        chunks = await engine.interrupt()
        assert len(chunks) > queued, "the interrupt returns the chunks that waited in the engine"
        for chunk in chunks:
            sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        engine.submit(sample)
        while sample.length < 100:
            for chunk in await engine.poll():
                sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        assert sample.response_ids == list(range(sample.length)), "every token came once, in order"


async def test_arrived_chunks_are_returned_before_the_death_of_the_engine_is_reported() -> None:
    async with remote(StreamEngine(endless, Capacity(4, 10**6))) as (engine, channel):
        engine.submit(some_sample())
        await turns()
        channel.close()
        await turns()
        assert await engine.poll()
        with pytest.raises(EngineError, match="the channel was closed"):
            await engine.poll()
        with pytest.raises(EngineError, match="the channel was closed"):
            await engine.ping()


async def test_a_defect_of_the_engine_ends_every_wait_with_its_message() -> None:
    class Defective(StreamEngine):
        async def poll(self) -> list[Chunk]:
            raise ZeroDivisionError("a defect")

    async with remote(Defective(endless, Capacity(4, 10**6))) as (engine, _):
        engine.submit(some_sample())
        with pytest.raises(EngineError, match="a defect"):
            await engine.poll()


async def test_a_refused_request_affects_only_its_sample() -> None:
    class Refusing(StreamEngine):
        def submit(self, sample: Sample) -> None:
            if sample.group_id == 1:
                raise ValueError("too long")
            super().submit(sample)

    first, second = some_sample(0), some_sample(1)
    async with remote(Refusing(endless, Capacity(4, 10**6))) as (engine, _):
        engine.submit(first)
        engine.submit(second)
        errors: list[tuple[str, str]] = []
        while not errors:
            errors = [(chunk.sample_id, chunk.error) for chunk in await engine.poll() if chunk.error is not None]
        assert errors == [(second.id, "too long")]
        assert {chunk.sample_id for chunk in await engine.poll()} == {first.id}


async def test_a_sample_that_fills_the_context_is_refused_without_a_call() -> None:
    async with remote(StreamEngine(endless, Capacity(4, 10**6))) as (engine, _):
        engine.capacity = Capacity(4, 2)
        with pytest.raises(ValueError, match="2 tokens fill the context"):
            engine.submit(some_sample())
        assert await engine.poll() == []


async def test_an_unanswered_call_ends_with_an_error() -> None:
    engine = Remote()
    engine.connect(LocalChannel(Inbox(), Inbox()))
    engine.patience = 0.01
    with pytest.raises(EngineError, match="hung: it left 'ping' unanswered"):
        await engine.ping()
