"""Streams of real servers, read in a process of their own: as exact as in this one."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from april.engines.pool import EnginePool
from april.engines.servers.stream_reader import StreamReader
from april.rollout.engine import KVPolicy
from april.rollout.sampling import SamplingParams
from tests.servers.conftest import SLOTS, Connect, make_samples, warnings_in
from tests.servers.test_engines import EXACT, absorb, advance, error_by_version, finish, reach, submit
from tests.servers.tiny import Oracle


@pytest_asyncio.fixture
async def reader() -> AsyncIterator[StreamReader]:
    reader = StreamReader()
    yield reader
    await reader.close()


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_interrupted_and_resumed_under_new_weights(
    connect: Connect,
    reader: StreamReader,
    oracles: list[Oracle],
    models: list[Path],
    on_update: KVPolicy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = await connect(on_update=on_update, stream_interval="auto")
    await engine.use_reader(reader)
    samples = make_samples(SLOTS + 4, SamplingParams(240, temperature=0.8))
    for version in range(3):
        if version:
            await engine.update_weights(version, models[version])
        submit(engine, samples)
        if version < 2:
            while not any((sample.versions == version).any() for sample in samples):
                await advance(engine, samples)
            absorb(await engine.interrupt(), samples)
            assert await engine.poll() == []
    await finish(engine, samples)
    assert all(sample.length == 240 for sample in samples)
    assert {0, 1, 2} == {version for sample in samples for version in sample.versions}
    if on_update == "recompute":
        assert max(error_by_version(sample, oracles) for sample in samples) < EXACT
    else:  # until its first update a sample has seen keys and values of one policy only
        for sample in samples:
            first = int((sample.versions == sample.versions[0]).sum())
            expected = oracles[sample.versions[0]].logprobs(sample)[:first]
            assert np.abs(expected - sample.logprobs[:first]).max() < EXACT
    # Every stream has the end that the server counts: equal numbers of tokens, of the same versions.
    assert not warnings_in(caplog)


async def test_a_killed_process_loses_no_token(
    connect: Connect, reader: StreamReader, oracles: list[Oracle], models: list[Path]
) -> None:
    engine = await connect()
    await engine.use_reader(reader)
    pool = EnginePool([engine])
    await pool.update_weights(0, models[0])
    samples = make_samples(SLOTS, SamplingParams(160))
    submit(pool, samples)
    await reach(pool, samples, 30)
    assert reader.process is not None
    os.kill(reader.process.pid, signal.SIGKILL)
    by_id = {sample.id: sample for sample in samples}
    while any(sample.finish is None for sample in samples):
        for chunk in await pool.poll():
            for error in absorb([chunk], samples):
                assert "was lost: " in error
                pool.submit(by_id[chunk.sample_id])
    assert reader.life == 2
    assert all(sample.length == 160 for sample in samples)
    assert max(error_by_version(sample, oracles) for sample in samples) < EXACT
    await pool.close()
