"""A slow stage slows down the stages before it, and no queue grows without bound. Counted, never timed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from april import (
    Capacity,
    Chunk,
    Group,
    Prompt,
    RolloutParams,
    RolloutScheduler,
    Sample,
    SamplingParams,
    StreamEngine,
)
from april.engines.pool import EnginePool
from april.reporting.metrics_log import MetricsLog
from april.reporting.trace import TraceWriter
from tests.engines.servers.test_tensorrt_llm import RecordedServer, connect, server, serving  # noqa: F401 (a fixture)
from tests.limits import HANG
from tests.scripted_engine import ScriptedEngine

BUDGET, BACKLOG, SLOTS = 500, 16, 4


def samples(n: int, budget: int = BUDGET) -> list[Sample]:
    return [Group.start(i, Prompt((1, 2)), 1, SamplingParams(budget), 0).samples[0] for i in range(n)]


class Source:
    """Streams of single tokens, and how many of them it has made."""

    def __init__(self) -> None:
        self.made = 0

    async def generate(self, sample: Sample) -> AsyncIterator[tuple[list[int], list[float]]]:
        for _ in range(sample.budget_left):
            self.made += 1
            yield [5], [-1.0]

    def engine(self) -> StreamEngine:
        return StreamEngine(self.generate, Capacity(SLOTS, 10_000), backlog=BACKLOG)


async def let_everything_run() -> None:
    for _ in range(2000):
        await asyncio.sleep(0)


async def test_streams_wait_for_their_consumer() -> None:
    source = Source()
    engine, taken = source.engine(), 0
    for sample in samples(8):
        engine.submit(sample)
    while taken < 8 * BUDGET:
        await let_everything_run()
        chunks = await engine.poll()
        assert 0 < len(chunks) <= BACKLOG + SLOTS
        taken += len(chunks)
        assert source.made <= taken + BACKLOG + SLOTS
    await engine.close()


async def test_replicas_wait_for_their_consumer() -> None:
    sources = [Source(), Source()]
    pool, taken = EnginePool([source.engine() for source in sources], backlog=BACKLOG), 0
    for sample in samples(8):
        pool.submit(sample)
    most = 3 * BACKLOG + 4 * SLOTS
    while taken < 8 * BUDGET:
        await let_everything_run()
        chunks = await pool.poll()
        assert 0 < len(chunks) <= most
        taken += len(chunks)
        assert sum(source.made for source in sources) <= taken + 2 * most
    await pool.close()


async def test_servers_are_not_read_without_a_consumer(server: tuple[RecordedServer, str]) -> None:  # noqa: F811
    _, url = server
    engine = await connect(url, backlog=BACKLOG)
    budget, taken = 150, 0
    for sample in samples(SLOTS, budget):
        engine.submit(sample)
    while taken < SLOTS * budget:
        for _ in range(50):  # servers write an event a millisecond: more than the backlog comes if it is read
            await asyncio.sleep(0.001)
        chunks = await engine.poll()
        assert 0 < len(chunks) <= BACKLOG + SLOTS
        taken += sum(len(chunk.token_ids) for chunk in chunks)
    await engine.close()


async def test_a_reader_who_comes_late_finds_no_request_stalled(server: tuple[RecordedServer, str]) -> None:  # noqa: F811
    _, url = server
    engine = await connect(url, backlog=BACKLOG, stall_timeout=0.2)
    waiting = {sample.id: sample for sample in samples(SLOTS, 60)}
    for sample in waiting.values():
        engine.submit(sample)
    while not engine.requests._queue.full:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.6)  # longer than a stall
    while any(sample.finish is None for sample in waiting.values()):
        for chunk in await engine.poll():
            assert chunk.error is None
            waiting[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
    await engine.close()


class Chatterbox(RecordedServer):
    """A server that never stops talking: after a response, or within its first event."""

    def __init__(self, within: bytes | None) -> None:
        super().__init__()
        self.within = within

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        if self.within is None:
            await response.write(
                self.event(body["model"], [5] * body["max_tokens"], [-1.0] * body["max_tokens"], "length")
            )
        try:
            while True:
                await response.write((self.within or b"\n") * 2**16)
        except (ConnectionError, asyncio.CancelledError):
            self.cancelled += 1
            raise


@pytest.mark.parametrize("within", [None, b"x"])
async def test_a_server_that_sends_an_endless_event_is_disconnected(
    within: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("april.engines.servers.requests.MAX_EVENT_BYTES", 2**20)
    chatterbox = Chatterbox(within)
    async with serving(chatterbox) as url:
        engine = await connect(url)
        for sample in samples(SLOTS, 20):
            engine.submit(sample)
        chunks: list[Chunk] = []
        async with asyncio.timeout(HANG):
            while sum(chunk.finish is not None or chunk.error is not None for chunk in chunks) < SLOTS:
                chunks += await engine.poll()
            while chatterbox.cancelled < SLOTS:
                await asyncio.sleep(0.01)
        if within:
            assert all("an event of more than" in str(chunk.error) for chunk in chunks)
        else:
            assert sum(len(chunk.token_ids) for chunk in chunks) == SLOTS * 20
        await engine.close()


def prompts() -> Iterator[Prompt]:
    return (Prompt((1, 2, i), f"prompt {i}") for i in itertools.count())


@pytest.mark.parametrize("filtered", [False, True])
async def test_slow_rewards_hold_up_admission(filtered: bool) -> None:
    gate, waiting, most = asyncio.Event(), 0, 0

    async def score(prompt: Prompt, sample: Sample) -> float:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await gate.wait()
        waiting -= 1
        return float(sample.length % 2)

    rollouts = RolloutScheduler(
        ScriptedEngine(slots=100),
        prompts(),
        score,
        RolloutParams(rollout_batch_size=3, over_sampling_batch_size=6, n_samples_per_prompt=2),
        sampling=SamplingParams(max_tokens=60),
        dynamic_filter=(lambda group: group.id % 3 > 0) if filtered else None,
    )
    async with rollouts:
        for _ in range(4):
            gate.clear()
            before = rollouts.buffer.admitted
            step = asyncio.create_task(rollouts.next_batch())
            await let_everything_run()
            assert not step.done()
            assert len(rollouts.buffer) <= 6
            assert rollouts.buffer.admitted <= before + 6
            assert most <= 6 * 2
            assert rollouts.in_flight == 0, "nothing more is generated until a reward comes"
            gate.set()
            assert len((await step).groups) == 3
            await rollouts.update_weights()


async def test_a_slow_trainer_finds_no_sample_in_flight() -> None:
    engine = ScriptedEngine(slots=100)
    rollouts = RolloutScheduler(
        engine,
        prompts(),
        lambda prompt, sample: 1.0,
        RolloutParams(rollout_batch_size=3, over_sampling_batch_size=6, n_samples_per_prompt=2),
        sampling=SamplingParams(max_tokens=60),
    )
    async with rollouts:
        for _ in range(3):
            await rollouts.next_batch()
            handed_out = sum(map(len, engine.ledger.values()))
            await let_everything_run()
            assert sum(map(len, engine.ledger.values())) == handed_out
            assert len(rollouts.buffer) <= 6
            await rollouts.update_weights()


def test_the_log_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    """Nothing is queued for a slow disk: writing takes as long as it takes."""
    with MetricsLog(tmp_path) as metrics, TraceWriter(tmp_path) as trace:
        for step in range(5):
            metrics.write({"step": step, "loss": 0.5})
            trace.write({"step": step})
            for name in ("metrics.jsonl", "trace.jsonl"):
                assert json.loads((tmp_path / name).read_text().splitlines()[-1])["step"] == step


def test_the_queue_of_the_tensorboard_writer_is_bounded(tmp_path: Path) -> None:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    assert 0 < writer.file_writer.event_writer._event_queue._maxsize <= 100
    writer.close()
