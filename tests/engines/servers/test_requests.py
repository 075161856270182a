"""Every failure of a stream is reported for its sample."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from april.engines.servers import vllm
from april.engines.servers.vllm import connect_vllm
from tests.engines.servers.test_stream_reader import (
    CONNECT,
    LONG,
    absorb,
    check,
    make_samples,
    playback,
    playing,
    run,
    submit,
)


@pytest.mark.parametrize(
    "odd", [AttributeError("no such field"), RecursionError("too deep"), OverflowError("too large")]
)
async def test_an_unexpected_error_is_reported_and_the_sample_resumes(
    odd: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, left = vllm.decode, [odd]

    def failing(event: bytes) -> Any:
        if left:
            raise left.pop()
        return decode(event)

    monkeypatch.setattr(vllm, "decode", failing)
    samples = make_samples(3, 60)
    async with playing("vllm", rate=4000.0) as (url,):
        engine = await connect_vllm(url, vocab_size=playback.VOCABULARY)
        try:
            submit(engine, samples)
            told = await run(engine, samples, lambda: not engine.running)
            assert len(told) == 1
            assert str(odd) in told[0]
            unfinished = [sample for sample in samples if sample.finish is None]
            assert len(unfinished) == 1
            submit(engine, unfinished)
            assert not await run(engine, samples, lambda: all(sample.finish for sample in samples))
        finally:
            await engine.close()
    check(samples)


@pytest.mark.parametrize("kind", CONNECT)
async def test_an_interrupt_of_everything_is_not_a_call_for_each_stream(kind: str) -> None:
    samples = make_samples(40, LONG)
    async with playing(kind) as (url,), aiohttp.ClientSession() as session:

        async def calls() -> int:
            async with session.get(f"{url}/played") as answer:
                return int((await answer.json())["calls"])

        engine = await CONNECT[kind](url, vocab_size=playback.VOCABULARY)
        try:
            submit(engine, samples)
            await run(engine, samples, lambda: all(sample.length for sample in samples))
            before = await calls()
            absorb(await engine.interrupt(), samples)
            # One that finds a stream still running is made again, after twice as long each time.
            assert await calls() - before < 10
        finally:
            await engine.close()
    check(samples)
