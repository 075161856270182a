"""Stopping some samples of an engine by name: no token of any sample is lost, or comes twice, or is another one."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Prompt, SamplingParams
from april.engines.embedded import EmbeddedEngine
from april.engines.job import JobEngine, LocalEngineWorker
from april.engines.pool import EnginePool
from april.integrations.trainer_ranks import TrainerRanks
from april.rollout.engine import Chunk, EngineError
from april.rollout.evaluation import evaluate
from april.rollout.generation.in_flight import SharedEngine
from april.rollout.params import FaultSettings
from april.rollout.trajectory.group import Group
from tests.engines.architectures import append, assert_behaviour, model, responses, run, samples
from tests.engines.interrupts import Moment, finish, moments
from tests.engines.test_pool import Machine, length_of, token_at

POLICY = model()
UNDISTURBED = responses(asyncio.run(run(EmbeddedEngine(POLICY, kv_cache_bytes=1 << 24), samples())))
COUNT = 9


@settings(max_examples=20, deadline=None)
@given(
    schedule=moments(COUNT),
    max_num_seqs=st.integers(1, COUNT),
    prefill_chunk=st.integers(1, 40),
    kv_cache_bytes=st.sampled_from([1 << 24, 200_000, 110_000]),
    stream_interval=st.integers(1, 4),
)
def test_the_embedded_engine(schedule: list[Moment], **config: Any) -> None:
    done = samples()
    asyncio.run(finish(EmbeddedEngine(POLICY, **config), done, schedule))
    assert responses(done) == UNDISTURBED
    assert_behaviour(POLICY, done)


@settings(max_examples=5, deadline=None)
@given(schedule=moments(COUNT), max_num_seqs=st.integers(1, 4))
def test_a_pool_of_embedded_engines(schedule: list[Moment], max_num_seqs: int) -> None:
    async def main() -> None:
        engines = [EmbeddedEngine(POLICY, kv_cache_bytes=1 << 24, max_num_seqs=max_num_seqs) for _ in range(2)]
        pool = EnginePool(engines)
        await finish(pool, done, schedule)
        await pool.close()

    done = samples()
    asyncio.run(main())
    assert responses(done) == UNDISTURBED


def scripted() -> Group:
    return Group.start(0, Prompt((1,)), COUNT, SamplingParams(max_tokens=200), seed=0)


def assert_scripted(group: Group) -> None:
    for sample in group.samples:
        length = length_of(sample.seed, 200)
        assert sample.response_ids == [token_at(sample.seed, i) for i in range(length)]


@settings(max_examples=60, deadline=None)
@given(schedule=moments(COUNT), slots=st.integers(1, COUNT))
def test_the_stream_engine(schedule: list[Moment], slots: int) -> None:
    group = scripted()
    asyncio.run(finish(Machine(slots=slots), group.samples, schedule))
    assert_scripted(group)


@settings(max_examples=60, deadline=None)
@given(schedule=moments(COUNT), slots=st.integers(1, 4), fault=st.sampled_from([None, "HTTP 500"]))
def test_a_pool_with_replicas_that_fail(schedule: list[Moment], slots: int, fault: str | None) -> None:
    async def main() -> None:
        machines = [Machine(f"replica {i}", slots) for i in range(3)]
        machines[0].fault, machines[0].chance = fault, 0.1
        pool = EnginePool(machines, health_timeout=0.5, backlog=4)
        await finish(pool, group.samples, schedule)
        await pool.close()

    group = scripted()
    asyncio.run(main())
    assert_scripted(group)


@settings(max_examples=30, deadline=None)
@given(schedule=moments(COUNT), slots=st.integers(1, 4))
def test_the_engine_of_a_job_of_one_process(schedule: list[Moment], slots: int) -> None:
    async def main() -> None:
        machine = Machine(slots=slots)
        await finish(
            JobEngine(TrainerRanks(), LocalEngineWorker(machine), [machine.capacity], keeps=False),
            group.samples,
            schedule,
        )

    group = scripted()
    asyncio.run(main())
    assert_scripted(group)


async def test_the_engine_of_a_job_accepts_its_samples_after_a_failed_interrupt() -> None:
    class Failing(Machine):
        fails = True

        async def interrupt(self, sample_ids: Any = None) -> list[Chunk]:
            chunks = await super().interrupt(sample_ids)
            if self.fails:
                raise EngineError("scripted failure")
            return chunks

    machine, group = Failing(), scripted()
    engine = JobEngine(TrainerRanks(), LocalEngineWorker(machine), [machine.capacity], keeps=False)
    for sample in group.samples:
        engine.submit(sample)
    with pytest.raises(EngineError, match="scripted failure"):
        await engine.interrupt()
    machine.fails = False
    await finish(engine, group.samples, [])
    assert_scripted(group)


async def test_an_interrupted_shared_prompt_is_computed_by_the_next_sample() -> None:
    """The first of a group prefills their prompt, a few tokens a pass, and is stopped before it is through."""
    engine, done = EmbeddedEngine(POLICY, kv_cache_bytes=1 << 24, prefill_chunk=2), samples()
    group = [sample for sample in done if sample.prompt_ids == max((s.prompt_ids for s in done), key=len)]
    assert len(group) > 2
    assert len(group[0].prompt_ids) > 4
    for sample in group:
        engine.submit(sample)
    poll = asyncio.create_task(engine.poll())
    for _ in range(2):  # a pass each
        await asyncio.sleep(0)
    assert await engine.interrupt([group[0].id]) == []
    append(group, await poll)
    while any(sample.finish is None for sample in group[1:]):
        append(group, await engine.poll())
    assert group[0].length == 0
    await run(engine, [group[0]])
    assert responses(group) == {sample.id: UNDISTURBED[sample.id] for sample in group}


async def test_an_evaluation_leaves_rollouts_in_flight_unchanged() -> None:
    """One slot: the rollout waits for it until the evaluation has ended, and then continues."""
    engine = EmbeddedEngine(POLICY, kv_cache_bytes=1 << 24, max_num_seqs=1)
    rollout = samples()[0]
    sampling, faults = SamplingParams(max_tokens=5), FaultSettings(max_retries=0)
    evaluating = asyncio.create_task(
        evaluate(SharedEngine(engine), [Prompt((1, 2, 3))], 2, sampling, seed=0, version=0, faults=faults)
    )
    await asyncio.sleep(0)
    engine.submit(copy.copy(rollout))
    assert all(group.complete for group in await evaluating)
    while rollout.finish is None:
        append([rollout], await engine.poll())
    assert rollout.response_ids == UNDISTURBED[rollout.id]
