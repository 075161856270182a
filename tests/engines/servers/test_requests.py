"""What becomes of a stream that fails: its sample is told, whatever it fails with."""

from __future__ import annotations

from typing import Any

import pytest

from april.engines.servers import vllm
from april.engines.servers.vllm import connect_vllm
from tests.engines.servers.test_intake import check, make_samples, playback, playing, run, submit


@pytest.mark.parametrize(
    "odd", [AttributeError("no such field"), RecursionError("too deep"), OverflowError("too large")]
)
async def test_an_error_that_nobody_thought_of_is_told_and_the_sample_goes_on(
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
