"""Streams that are read in processes of their own, from servers that play tokens back over real HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.engines.packed import pack, unpack
from april.engines.pool import EnginePool
from april.engines.replica import ReplicaGoneError
from april.engines.servers.server import ServerEngine
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.stream_interval import MOST, StreamInterval
from april.engines.servers.stream_reader import StreamReader, processes_for
from april.engines.servers.vllm import connect_vllm
from april.rollout.engine import Chunk, Engine, EngineError
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

PLAYBACK = Path(__file__).parents[3] / "benchmarks" / "playback.py"
LONG = 1200
"""Tokens of a sample that no interrupt, however late, finds finished: they play for seconds."""
CONNECT: dict[str, Callable[..., Any]] = {"vllm": connect_vllm, "sglang": connect_sglang}

spec = importlib.util.spec_from_file_location("playback", PLAYBACK)
assert spec is not None
assert spec.loader is not None
playback = importlib.util.module_from_spec(spec)
spec.loader.exec_module(playback)


@asynccontextmanager
async def playing(kind: str, replicas: int = 1, rate: float = 400.0) -> AsyncIterator[list[str]]:
    """URLs of servers that play back `rate` tokens/s a stream."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, PLAYBACK, "--kind", kind, "--replicas", str(replicas), "--rate", str(rate)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield [f"http://127.0.0.1:{port}" for port in json.loads(await process.stdout.readline())]
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def reading(kind: str, urls: Sequence[str], readers: int = 1, **settings: Any) -> AsyncIterator[Any]:
    """Engines on these servers, and the processes that read their streams in turn."""
    processes = [StreamReader(f"stream reader {i}", **settings) for i in range(readers)]
    engines: list[ServerEngine] = []
    try:
        for i, url in enumerate(urls):
            engine = await CONNECT[kind](url, vocab_size=playback.VOCABULARY, stream_interval=8)
            engines.append(engine)
            await engine.use_reader(processes[i % readers])
        yield engines, processes
    finally:
        for engine in engines:
            await engine.close()
        for process in processes:
            await process.close()
            assert process.process is None


def make_samples(n: int, tokens: int) -> list[Sample]:
    return [Group.start(i, Prompt((i, 4, 2, 3)), 1, SamplingParams(tokens), 0).samples[0] for i in range(n)]


def absorb(chunks: Sequence[Chunk], samples: Sequence[Sample]) -> list[str]:
    by_id = {sample.id: sample for sample in samples}
    for chunk in chunks:
        by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
    return [chunk.error for chunk in chunks if chunk.error is not None]


async def run(engine: Engine, samples: Sequence[Sample], until: Callable[[], bool]) -> list[str]:
    errors: list[str] = []
    while not until():
        errors += absorb(await engine.poll(), samples)
    return errors


def submit(engine: Engine, samples: Sequence[Sample]) -> None:
    for sample in samples:
        if sample.finish is None:
            engine.submit(sample)


def check(samples: Sequence[Sample]) -> None:
    """Every token and log-probability is the played one at its position."""
    for sample in samples:
        first = sample.prompt_ids[0]
        assert sample.response_ids == [playback.token_at(first, i) for i in range(sample.length)]
        assert sample.logprobs.tolist() == [playback.logprob_at(first, i) for i in range(sample.length)]


@pytest.mark.parametrize("kind", CONNECT)
async def test_every_token_arrives_once_across_interrupts_and_updates(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    samples = make_samples(40, LONG)
    async with playing(kind, 2) as urls, reading(kind, urls) as (engines, _):
        pool = EnginePool(engines)
        for version in range(3):
            submit(pool, samples)
            assert pool.running == len(samples)
            longest = max(sample.length for sample in samples) + 20
            assert not await run(pool, samples, lambda: max(s.length for s in samples) >= longest)  # noqa: B023
            if version:
                named = [sample.id for sample in samples[:20]]
                assert not absorb(await pool.interrupt(named), samples)
                before = sum(sample.length for sample in samples[:20])
                assert not absorb(await pool.poll(), samples)
                assert before == sum(sample.length for sample in samples[:20]), "what was interrupted gets no more"
            assert not absorb(await pool.interrupt(), samples)
            assert await pool.poll() == []
            check(samples)
            await pool.update_weights(version + 1, tmp_path)
        submit(pool, samples)
        assert not await run(pool, samples, lambda: all(sample.finish for sample in samples))
        await pool.close()
    check(samples)
    assert all(sample.length == LONG and sample.finish is FinishReason.LENGTH for sample in samples)
    assert {version for sample in samples for version in sample.versions.tolist()} == {0, 1, 2, 3}


async def test_samples_of_a_killed_process_move_and_the_process_restarts() -> None:
    samples = make_samples(60, 1200)
    async with playing("vllm", 2) as urls, reading("vllm", urls, readers=2) as (engines, processes):
        pool = EnginePool(engines)
        submit(pool, samples)
        await run(pool, samples, lambda: min(sample.length for sample in samples) >= 20)
        victim = processes[0]
        os.kill(victim.process.pid, signal.SIGKILL)
        lost = 0
        while not all(sample.finish for sample in samples):
            for chunk in await pool.poll():
                for error in absorb([chunk], samples):
                    assert "was lost: " in error
                    pool.submit(samples[int(chunk.sample_id.partition(".")[0])])
                    lost += 1
        assert 20 <= lost <= 40, "those of the other process go on"
        while not all(member.ready for member in pool.members):
            await asyncio.sleep(0.05)
        assert (victim.life, victim.down, processes[1].life) == (2, None, 1)
        more = make_samples(80, 30)
        submit(pool, more)
        assert engines[0].running > 0, "it gets work again"
        assert not await run(pool, more, lambda: all(sample.finish for sample in more))
        await pool.close()
    check(samples)
    check(more)


async def test_a_hanging_process_is_killed_and_ends_all_waits() -> None:
    (sample,) = make_samples(1, 10**5)
    async with playing("vllm") as urls, reading("vllm", urls) as ((engine,), (reader,)):
        engine.submit(sample)
        await run(engine, [sample], lambda: sample.length > 20)
        await engine.check()
        os.kill(reader.process.pid, signal.SIGSTOP)
        checking = asyncio.create_task(engine.check())
        interrupting = asyncio.create_task(engine.interrupt())
        engine.requests.patience = 0.1
        with pytest.raises(EngineError, match="stream reader 0 hung: it left 'ping' unanswered"):
            await engine.requests.ping()
        for waiting in (checking, interrupting):
            with pytest.raises(EngineError, match="hung"):
                await waiting
        absorb(await engine.abandon(), [sample])
        await engine.refresh()
        assert (reader.life, reader.down) == (2, None)
        engine.submit(sample)
        received = sample.length
        await run(engine, [sample], lambda: sample.length > received + 20)
    check([sample])


async def test_a_process_that_keeps_dying_is_given_up() -> None:
    (sample,) = make_samples(1, 5000)
    async with playing("vllm") as urls, reading("vllm", urls, restarts=1) as ((engine,), (process,)):
        for death in range(2):
            if death:
                await engine.refresh()
            engine.submit(sample)
            await run(engine, [sample], lambda: sample.length > 30 * (death + 1))  # noqa: B023
            os.kill(process.process.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="stream reader 0 died"):
                await run(engine, [sample], lambda: False)
            with pytest.raises(EngineError, match="stream reader 0 died"):
                await engine.check()
            absorb(await engine.abandon(), [sample])
        with pytest.raises(ReplicaGoneError, match="died 2 times in a row"):
            await engine.refresh()
        check([sample])


async def test_a_restarted_process_survives_orders_for_unknown_servers() -> None:
    """The process was restarted; one engine has noticed it and recovered, and the second engine has not yet."""
    samples = make_samples(2, 100)
    async with playing("vllm", 2) as urls, reading("vllm", urls) as (engines, (process,)):
        os.kill(process.process.pid, signal.SIGKILL)
        while process.down is None:
            await asyncio.sleep(0.01)
        await engines[0].refresh()
        engines[0].submit(samples[0])
        engines[1].submit(samples[1])
        with pytest.raises(EngineError, match="stream reader 0 died"):
            await engines[1].poll()
        await run(engines[0], samples[:1], lambda: samples[0].finish is not None)
        assert (process.life, process.down) == (2, None)
        await engines[1].abandon()
        await engines[1].refresh()
        engines[1].submit(samples[1])
        await run(engines[1], samples[1:], lambda: samples[1].finish is not None)
    check(samples)


async def test_a_slow_reader_pauses_the_streams_and_loses_no_token() -> None:
    samples = make_samples(30, 3000)
    async with playing("vllm", rate=2000.0) as urls:
        engine = await connect_vllm(urls[0], vocab_size=playback.VOCABULARY, backlog=16)
        process = StreamReader()
        await engine.use_reader(process)
        submit(engine, samples)
        await run(engine, samples, lambda: min(sample.length for sample in samples) > 8)
        while not engine.requests.behind:
            await asyncio.sleep(0.01)
        assert not await run(engine, samples, lambda: max(sample.length for sample in samples) > 600)
        while not engine.requests.behind:
            await asyncio.sleep(0.01)
        absorb(await engine.interrupt(), samples)
        submit(engine, samples)
        assert not await run(engine, samples, lambda: all(sample.finish for sample in samples))
        await engine.close()
        await process.close()
    check(samples)


async def test_errors_of_a_process_contain_the_name_of_the_server() -> None:
    (sample,) = make_samples(1, 5000)
    async with playing("vllm") as urls, reading("vllm", urls) as ((engine,), _):
        engine.submit(sample)
        await run(engine, [sample], lambda: sample.length > 20)
        # What a server of another version might send.
        engine.requests.vocab_size = 3
        absorb(await engine.interrupt(), [sample])
        await engine.requests.open()
        engine.submit(sample)
        errors = await run(engine, [sample], lambda: len(engine.requests) == 0)
        assert "outside the vocabulary" in errors[0]
        assert engine.name in errors[0]


CHUNKS = st.lists(
    st.builds(
        lambda id, tokens, version, finish, error: Chunk(
            id, [t for t, _ in tokens], [p for _, p in tokens], version, finish, error
        ),
        st.text(max_size=3),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e3, 0)), max_size=4),
        st.integers(0, 2**31 - 1),
        st.sampled_from([None, *FinishReason]),
        st.none() | st.text(),
    )
)


@given(CHUNKS)
def test_packed_chunks_are_the_same_chunks(chunks: list[Chunk]) -> None:
    again = unpack(pack(chunks))
    lists = [chunk._replace(token_ids=list(chunk.token_ids), logprobs=list(chunk.logprobs)) for chunk in again]
    assert lists == chunks


def test_how_many_processes_read() -> None:
    assert [processes_for(streams, 64) for streams in (1, 1024, 1025, 4096, 4097, 16384)] == [0, 0, 1, 1, 2, 4]
    assert processes_for(16384, 2) == 1


@given(st.floats(0.1, 1e4), st.integers(64, 10**5))
def test_the_interval_is_a_second_of_a_stream(speed: float, tokens: int) -> None:
    interval = StreamInterval("auto")
    assert interval.tokens == 8
    interval.ended("a server", 8, tokens, tokens // 8, tokens / speed)
    assert interval.tokens == max(1, min(MOST, round(speed)))
    assert StreamInterval.of(interval).tokens == interval.tokens, "who connects again knows the speed"
    assert StreamInterval.of("auto").tokens == 8


def test_a_server_that_sends_single_tokens_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    interval = StreamInterval(16)
    with caplog.at_level(logging.WARNING):
        interval.ended("vLLM at x", 16, 100, 7, 1.0)
        assert not caplog.records
        for _ in range(2):
            interval.ended("vLLM at x", 16, 100, 100, 1.0)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "vLLM at x sends one token an event"
    ]
    with pytest.raises(ValueError, match="stream_interval = 0"):
        StreamInterval(0)
