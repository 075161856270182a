"""Evaluations and rollouts on one engine: each gets its own tokens, and an evaluation uses one policy version."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Chunk, ChunkError, EngineError, Group, Prompt, RolloutBatch, RolloutScheduler, SamplingParams
from tests.rollout.test_overlap import passing
from tests.rollout.test_scheduler import SETTINGS, build, check_conservation, scheduler
from tests.scripted_engine import ScriptedEngine, response

MOMENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.booleans()), min_size=3, max_size=3)
"""For each step: moments of training, moments until an evaluation begins, and whether it is given up then."""
HELD_OUT = [Prompt((7, i), f"held out {i}") for i in range(3)]
SAMPLING = SamplingParams(max_tokens=60)


async def run(rollouts: RolloutScheduler, schedule: Any) -> tuple[list[RolloutBatch], list[list[Group]]]:
    """Steps that overlap, with evaluations that begin at any moment of them."""
    steps: list[RolloutBatch] = []
    evaluated: list[list[Group]] = []

    async def evaluate(after: int, give_up: bool) -> None:
        await passing(after)
        measuring = asyncio.create_task(rollouts.evaluate(HELD_OUT, 2, SAMPLING))
        if give_up:
            await passing(after)
            measuring.cancel()
        await asyncio.wait([measuring])
        if not measuring.cancelled():
            evaluated.append(measuring.result())

    async with rollouts:
        for training, after, give_up in schedule:
            beside = asyncio.create_task(evaluate(after, give_up))
            steps.append(await rollouts.next_batch())
            await passing(training)
            await rollouts.update_weights()
            if after % 2:
                async with rollouts.pause():
                    assert not rollouts.in_flight
            await beside
    return steps, evaluated


@given(SETTINGS, MOMENTS)
@settings(max_examples=40, deadline=None)
def test_each_token_is_in_its_sample_for_any_start_of_evaluations(s: dict[str, object], schedule: Any) -> None:
    engine, rollouts = build(s, overlap=True)
    steps, evaluated = asyncio.run(run(rollouts, schedule))
    check_conservation(s, engine, rollouts, steps)
    if s["max_staleness"] is not None:
        assert max(step.staleness.max() for step in steps) <= s["max_staleness"]
    for groups in evaluated:
        samples = [sample for group in groups for sample in group.samples]
        assert all(sample.response_ids == response(sample.seed, 60) for sample in samples)
        assert len({version for sample in samples for version in sample.versions}) == 1, "of one policy"


async def test_rollouts_continue_during_an_evaluation() -> None:
    engine = ScriptedEngine(slots=40)
    async with scheduler(engine, max_staleness=3, overlap=True) as rollouts:
        await rollouts.next_batch()
        held = SamplingParams(max_tokens=2000)
        measuring = asyncio.create_task(rollouts.evaluate([Prompt((7, i)) for i in range(8)], 4, held))
        await passing(4)
        before = rollouts.buffer.sampled_tokens
        await passing(10)
        assert rollouts.buffer.sampled_tokens > before
        assert await rollouts.next_batch()
        assert not measuring.done()
        swapping = asyncio.create_task(rollouts.update_weights())
        await passing(20)
        assert not measuring.done()
        assert rollouts.engine_version == 0, "the weights stay as long as they are evaluated"
        await swapping
        assert measuring.done()
        assert rollouts.engine_version == 1


async def test_a_chunk_of_an_unknown_sample_ends_the_rollouts_and_not_the_evaluation() -> None:
    class Confused(ScriptedEngine):
        confuse = False

        async def poll(self) -> list[Chunk]:
            chunks = await super().poll()
            return [*chunks, Chunk("nobody's", [1], [0.0], self.version)] if self.confuse else chunks

    engine = Confused(slots=40)
    async with scheduler(engine, max_staleness=3, overlap=True) as rollouts:
        await rollouts.next_batch()
        measuring = asyncio.create_task(rollouts.evaluate(HELD_OUT, 2, SAMPLING))
        await passing(2)
        engine.confuse = True
        await passing(20)
        engine.confuse = False
        with pytest.raises(ChunkError, match="nobody's"):
            await rollouts.next_batch()
        assert len(await measuring) == 3
        assert await rollouts.next_batch()


async def test_a_dead_engine_ends_rollout_and_evaluation_without_samples_in_flight() -> None:
    engine = ScriptedEngine(slots=40)
    async with scheduler(engine, max_staleness=3, overlap=True) as rollouts:
        await rollouts.next_batch()
        measuring = asyncio.create_task(rollouts.evaluate(HELD_OUT, 2, SamplingParams(max_tokens=2000)))
        await passing(3)
        engine.dead = True
        with pytest.raises(EngineError, match="was killed"):
            await measuring
        await passing(20)
        with pytest.raises(EngineError, match="was killed"):
            await rollouts.next_batch()
        assert not rollouts.in_flight
        engine.dead = False
        engine.flight.clear()
        assert await rollouts.next_batch()
