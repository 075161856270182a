"""`StreamEngine`: an engine of the user's own in one async generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from april import Capacity, Chunk, FinishReason, Group, Prompt, Sample, SamplingParams, StreamEngine
from april.engines.stream import Tokens


def samples(n: int) -> list[Sample]:
    return Group.start(0, Prompt((1,)), n, SamplingParams(max_tokens=10), 0).samples


async def count(sample: Sample) -> AsyncIterator[Tokens]:
    for token in range(sample.length, 10):
        await asyncio.sleep(0)
        yield [token], [-1.0]


async def drain(engine: StreamEngine, into: dict[str, list[int]], polls: int = 1000) -> None:
    for _ in range(polls):
        chunks = await engine.poll()
        if not chunks:
            return
        for chunk in chunks:
            into.setdefault(chunk.sample_id, []).extend(chunk.token_ids)


async def test_everything_yielded_comes_out_once_and_in_order() -> None:
    engine = StreamEngine(count, Capacity(2, 100))
    for sample in samples(5):
        engine.submit(sample)
    assert engine.running <= 2
    seen: dict[str, list[int]] = {}
    await drain(engine, seen)
    assert seen == {s.id: list(range(10)) for s in samples(5)}
    assert await engine.poll() == []


async def test_nothing_runs_after_an_interrupt_and_nothing_is_lost() -> None:
    engine = StreamEngine(count, Capacity(8, 100))
    mine = samples(3)
    for sample in mine:
        engine.submit(sample)
    seen: dict[str, list[int]] = {}
    await drain(engine, seen, polls=3)
    for chunk in await engine.interrupt():
        seen.setdefault(chunk.sample_id, []).extend(chunk.token_ids)
    assert engine.running == 0
    assert await engine.poll() == []
    for sample in mine:
        tokens = seen.get(sample.id, [])
        sample.extend(tokens, [-1.0] * len(tokens), 0)
        engine.submit(sample)
    await drain(engine, seen)
    assert seen == {s.id: list(range(10)) for s in mine}


async def test_a_cancelled_poll_loses_nothing() -> None:
    engine = StreamEngine(count, Capacity(8, 100))
    engine.submit(samples(1)[0])
    seen: dict[str, list[int]] = {}
    for turns in range(4):
        poll = asyncio.ensure_future(engine.poll())
        for _ in range(turns):
            await asyncio.sleep(0)
        poll.cancel()
        await asyncio.wait([poll])
        if not poll.cancelled():
            for chunk in poll.result():
                seen.setdefault(chunk.sample_id, []).extend(chunk.token_ids)
    await drain(engine, seen)
    assert seen == {"0.0": list(range(10))}


async def test_the_engine_says_version_finish_and_what_failed() -> None:
    """A generator that returns has stopped; the budget, the context and a stop token end a response by themselves."""

    async def generate(sample: Sample) -> AsyncIterator[Tokens]:
        yield [1], [-1.0]
        if sample.index == 0:
            raise RuntimeError("out of cheese")
        for _ in range((0, 0, 100, 8)[sample.index]):
            yield [2], [-1.0]
        if sample.index == 3:
            yield [7], [-1.0]

    engine = StreamEngine(generate, Capacity(8, 100))
    await engine.update_weights(3)
    sampling = SamplingParams(max_tokens=10, stop_token_ids=(7,))
    for sample in Group.start(0, Prompt((1,)), 4, sampling, 0).samples:
        engine.submit(sample)
    for sample in Group.start(1, Prompt((1,) * 95), 3, sampling, 0).samples[2:]:
        engine.submit(sample)
    chunks: list[Chunk] = []
    while new := await engine.poll():
        chunks += new
    assert {chunk.version for chunk in chunks} == {3}
    assert [(c.sample_id, c.error) for c in chunks if c.error] == [("0.0", "RuntimeError: out of cheese")]
    ends = {chunk.sample_id: chunk.finish for chunk in chunks if chunk.finish}
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert ends == {"0.1": stop, "0.2": length, "0.3": stop, "1.2": length}
    lengths = {id: sum(len(c.token_ids) for c in chunks if c.sample_id == id) for id in ("0.0", *ends)}
    assert lengths == {"0.0": 1, "0.1": 1, "0.2": 10, "0.3": 10, "1.2": 5}


async def test_generators_wait_for_a_slow_reader() -> None:
    yielded = 0

    async def endless(sample: Sample) -> AsyncIterator[Tokens]:
        nonlocal yielded
        while True:
            await asyncio.sleep(0)
            yielded += 1
            yield [], []

    engine = StreamEngine(endless, Capacity(8, 100), backlog=16)
    for sample in samples(2):
        engine.submit(sample)
    for _ in range(200):
        await asyncio.sleep(0)
    assert yielded <= 18
    assert len(await engine.poll()) <= 18
    await engine.close()
