"""`StreamEngine`: an engine of the user's own in one async generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from april import Capacity, Chunk, ChunkError, FinishReason, Group, Prompt, Sample, SamplingParams, StreamEngine
from april.engines.stream_engine import Tokens
from april.rollout.journal.journal import Journal
from tests.limits import HANG
from tests.scheduling import scheduler_of


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


async def test_yielded_chunks_are_returned_once_and_in_order() -> None:
    engine = StreamEngine(count, Capacity(2, 100))
    for sample in samples(5):
        engine.submit(sample)
    assert engine.running <= 2
    seen: dict[str, list[int]] = {}
    await drain(engine, seen)
    assert seen == {s.id: list(range(10)) for s in samples(5)}
    assert await engine.poll() == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [((), "the prompt is empty"), (range(8), "8 tokens fill the context of the engine, 8 tokens: shorten the prompt")],
)
async def test_a_sample_that_cannot_get_a_token_is_refused(prompt: Iterable[int], message: str) -> None:
    engine = StreamEngine(count, Capacity(2, 8))
    (sample,) = Group.start(0, Prompt(tuple(prompt)), 1, SamplingParams(max_tokens=10), 0).samples
    with pytest.raises(ValueError, match=message):
        engine.submit(sample)
    assert await engine.poll() == []


async def test_no_request_runs_after_an_interrupt_and_no_token_is_lost() -> None:
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


async def test_a_cancelled_poll_loses_no_chunk() -> None:
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


async def test_chunks_have_version_finish_reason_and_error() -> None:
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


@pytest.mark.parametrize("ending", ["returns", "goes on", "fails"])
async def test_a_cancelled_generator_leaves_its_sample_unfinished(ending: str) -> None:
    async def generate(sample: Sample) -> AsyncIterator[Tokens]:
        for token in range(sample.length, 10):
            try:
                await asyncio.sleep(0 if token < 3 else 1000)
            except asyncio.CancelledError:
                if ending == "returns":
                    return
                if ending == "fails":
                    raise RuntimeError("the connection is closed") from None
            yield [token], [-1.0]

    engine = StreamEngine(generate, Capacity(8, 100))
    engine.submit(samples(1)[0])
    chunks: list[Chunk] = []
    while sum(len(chunk.token_ids) for chunk in chunks) < 3:
        chunks += await engine.poll()
    chunks += await engine.interrupt()
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == ([0, 1, 2, 3] if ending == "goes on" else [0, 1, 2])
    assert all(chunk.finish is None and chunk.error is None for chunk in chunks)
    assert engine.running == 0


async def test_an_endless_generator_is_abandoned_and_its_slot_is_free() -> None:
    released = asyncio.Event()

    async def generate(sample: Sample) -> AsyncIterator[Tokens]:
        if sample.index == 0 and sample.length == 0:
            try:
                yield [1], [-1.0]
                await asyncio.sleep(1000)
            finally:
                while not released.is_set():
                    try:
                        await released.wait()
                    except asyncio.CancelledError:
                        continue
        yield [2], [-1.0]

    engine = StreamEngine(generate, Capacity(1, 100), cleanup_timeout=0.05)
    first, second = samples(2)
    engine.submit(first)
    async with asyncio.timeout(HANG):
        first.extend(*(await engine.poll())[0][1:4])
        assert await engine.interrupt() == []
        assert engine.running == 0
        seen: dict[str, list[int]] = {}
        engine.submit(first)
        engine.submit(second)
        await drain(engine, seen)
    assert seen == {"0.0": [2], "0.1": [2]}
    released.set()
    await asyncio.sleep(0.01)
    assert await engine.poll() == [], "nothing comes of a generator that was left behind"


async def reward(prompt: Prompt, sample: Sample) -> float:
    return 1.0


SEQUENCES: dict[str, Callable[[list[float]], Any]] = {
    "tuples": tuple,
    "NumPy": np.array,
    "torch": torch.tensor,
    "NumPy scalars": lambda values: list(np.array(values)),
    "tensors": lambda values: list(torch.tensor(values)),
}


@pytest.mark.parametrize("kind", SEQUENCES)
async def test_tokens_may_be_any_sequence_and_survive_the_journal(kind: str, tmp_path: Path) -> None:
    """Token id 0 as well, and whatever the generator does to its buffers afterwards."""

    async def generate(sample: Sample) -> AsyncIterator[Tokens]:
        for token in range(sample.length, 6, 2):
            await asyncio.sleep(0)
            ids = SEQUENCES[kind]([token % 3, 0])
            yield ids, SEQUENCES[kind]([-0.5, 0.0])
            if kind in ("NumPy", "torch"):
                ids[:] = 7

    def rollouts(journal: Journal) -> Any:
        engine = StreamEngine(generate, Capacity(8, 100))
        sampling = SamplingParams(max_tokens=6)
        prompts = (Prompt((1,), str(number)) for number in range(9))
        return scheduler_of(
            engine,
            prompts,
            reward,
            rollout_batch_size=1,
            over_sampling_batch_size=1,
            n_samples_per_prompt=2,
            sampling=sampling,
            journal=journal,
        )

    for _ in range(2):  # sampled, and replayed
        journal = Journal(tmp_path / "journal", flush_seconds=0)
        journal.seek(None)
        async with rollouts(journal) as scheduler:
            step = await scheduler.next_batch()
        journal.close()
        for sample in step.groups[0].samples:
            assert sample.response_ids == [0, 0, 2, 0, 1, 0]
            assert all(type(token) is int for token in sample.response_ids)
            assert sample.logprobs.tolist() == [-0.5, 0.0] * 3


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "rule"),
    [
        ([-1], [-1.0], "token id -1 is negative"),
        ([3, -1], [-1.0, -1.0], "token id -1 is negative"),
        ([1 << 31], [-1.0], "31-bit integers"),
        ([1.5], [-1.0], "31-bit integers"),
        (["1"], [-1.0], "31-bit integers"),
        ([1], [0.5], "a log-probability is 0.5, above 0"),
        ([1, 2], [-1.0, 0.5], "a log-probability is 0.5, above 0"),
        ([1], [None], "log-probabilities must be numbers"),
        ([1], [float("nan")], "no finite number"),
        ([1, 2], [-1.0, float("-inf")], "no finite number"),
        ([1, 2], [-1.0], "2 tokens came with 1 log-probabilities"),
        (np.array([[1, 2]]), np.array([[-1.0, -2.0]]), "31-bit integers"),
    ],
)
async def test_values_that_no_policy_draws_are_refused_by_name(token_ids: Any, logprobs: Any, rule: str) -> None:
    async def generate(sample: Sample) -> AsyncIterator[Tokens]:
        yield token_ids, logprobs

    engine = StreamEngine(generate, Capacity(8, 100))
    prompts = repeat(Prompt((1,)))
    params = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "over_sampling_batch_size": 1}
    async with scheduler_of(engine, prompts, reward, sampling=SamplingParams(max_tokens=6), **params) as rollouts:
        with pytest.raises(ChunkError, match=f"sample 0.0: .*{rule}"):
            await rollouts.next_batch()


def test_rounding_errors_of_log_probabilities_are_accepted() -> None:
    (sample,) = samples(1)
    sample.extend([1, 2], [1e-6, -1.0], 0)
    sample.extend([3], [5e-4], 0)
    assert sample.response_ids == [1, 2, 3]
