"""Episodes on the embedded engine: real forward passes, a KV cache that waits for the environment."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Engine, Group, Prompt, RolloutScheduler, SamplingParams
from april.engines.embedded.engine import EmbeddedEngine
from april.engines.embedded.process import EngineProcess
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.pool import EnginePool
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from tests import tiny
from tests.scheduling import scheduler_of
from tests.talking import Numbers, World

SAMPLING = SamplingParams(max_tokens=40, max_turns=6, stop_token_ids=tuple(range(20, 30)))
CONTEXT = 96


class Low(World):
    """Its environments answer with tokens of the tiny model's vocabulary."""

    def __call__(self) -> Any:
        room = super().__call__()
        reset, step = room.reset, room.step

        async def low_reset(prompt: Any, seed: int) -> Any:
            said = await reset(prompt, seed)
            return type(said)(token % 100 for token in said)

        async def low_step(turn: Any) -> Any:
            answer = await step(turn)
            return type(answer)(
                type(answer.observation)(token % 100 for token in answer.observation), answer.reward, answer.done
            )

        room.reset, room.step = low_reset, low_step
        return room


def engine_of(model: Any, running: int, interval: int, **own: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        model, max_num_seqs=running, context_length=CONTEXT, on_update="keep", stream_interval=interval, **own
    )


def rollouts(world: World, engine: Engine, target: int, batch_size: int = 2, **own: Any) -> RolloutScheduler:
    prompts = (Prompt((5, 6, 7, 8 + i % 9), str(i)) for i in range(10_000))

    async def score(prompt: Prompt, sample: Any) -> float:
        return 1.0

    return scheduler_of(
        engine,
        prompts,
        score,
        episodes=EnvironmentEpisodes(world, Numbers(), CONTEXT),
        rollout_batch_size=batch_size,
        over_sampling_batch_size=target,
        n_samples_per_prompt=2,
        max_staleness=4,
        retry_delay=0.0,
        **{"sampling": SAMPLING, **own},
    )


def collected(scheduler: RolloutScheduler, steps: int) -> dict[int, Group]:
    async def run() -> dict[int, Group]:
        groups: dict[int, Group] = {}
        async with scheduler:
            for _ in range(steps):
                groups |= {group.id: group for group in (await scheduler.next_batch()).groups}
                await scheduler.update_weights()
        return groups

    return asyncio.run(run())


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny.model()


@pytest.fixture(scope="module")
def undisturbed(policy: Any) -> dict[int, Group]:
    """Synchronous, with environments that answer at once."""
    return collected(rollouts(Low(slowness=0), engine_of(policy, 8, 100), 2), 6)


@given(
    seed=st.integers(0, 999),
    slowness=st.sampled_from([0, 2, 12]),
    running=st.integers(1, 8),
    interval=st.sampled_from([1, 3, 8]),
    target=st.integers(2, 6),
    memory=st.sampled_from([None, 100_000]),
)
@settings(max_examples=5, deadline=None)
def test_an_interrupted_episode_has_the_same_tokens_as_an_uninterrupted_one(
    policy: Any,
    undisturbed: dict[int, Group],
    seed: int,
    slowness: int,
    running: int,
    interval: int,
    target: int,
    memory: int | None,
) -> None:
    """In the middle of a turn, between turns and during an environment's step, under random schedules, with a KV cache
    that is too small for all."""
    engine = engine_of(policy, running, interval, kv_cache_bytes=memory)
    found = collected(rollouts(Low(seed, slowness), engine, target), 3)
    assert len(found) == 6
    same(found, undisturbed)


STOPS = replace(SAMPLING, stop=("4 1", "7 ", "99"))


def words(token_ids: Any) -> str:
    return " ".join(map(str, token_ids))


@given(seed=st.integers(0, 999), running=st.integers(1, 8), interval=st.sampled_from([1, 3, 8]))
@settings(max_examples=3, deadline=None)
def test_turns_end_at_stop_strings_however_many_tokens_the_engine_has_drawn(
    policy: Any, seed: int, running: int, interval: int
) -> None:
    """The engine goes on with the cache of a turn whose last tokens were dropped."""
    whole = collected(rollouts(Low(slowness=0), engine_of(policy, 8, 1), 2, sampling=STOPS, decode=words), 5)
    engine = engine_of(policy, running, interval)
    found = collected(rollouts(Low(seed, 2), engine, 4, sampling=STOPS, decode=words), 3)
    same(found, whole)
    turns = [
        sample.turn_ids(turn) for group in found.values() for sample in group.samples for turn in range(sample.turns)
    ]
    stopped = [turn for turn in turns if turn[-1] not in STOPS.stop_token_ids]
    assert stopped
    assert all(any(stop in words(turn) for stop in STOPS.stop) for turn in stopped)
    assert not any(stop in words(turn[:-1]) for turn in turns for stop in STOPS.stop)


def same(found: dict[int, Group], undisturbed: dict[int, Group]) -> None:
    for id, group in found.items():
        for sample, whole in zip(group.samples, undisturbed[id].samples, strict=True):
            assert sample.response_ids == whole.response_ids
            assert sample.finish == whole.finish
            assert (sample.versions == -1).tolist() == (whole.versions == -1).tolist()
            np.testing.assert_allclose(sample.logprobs, whole.logprobs, atol=1e-4)
    assert max(sample.turns for group in found.values() for sample in group.samples) > 1


async def test_a_replica_killed_within_a_turn_loses_no_token(
    policy: Any, undisturbed: dict[int, Group], tmp_path: Path
) -> None:
    """The second engine continues with the samples at their positions, and their environments are not called."""
    tiny.save(tmp_path / "policy")
    path = str(tmp_path / "policy")
    settings = EmbeddedSettings(model=path, threads=1, max_num_seqs=6, context_length=CONTEXT, on_update="keep")
    victim = await EngineProcess.start(settings)
    pool = EnginePool([victim, engine_of(policy, 6, 1)])
    world = Low(slowness=0)
    killed: list[str] = []

    def kill(scheduler: RolloutScheduler) -> None:
        """As soon as the victim has a token of a second turn, or a later one, and not its end."""
        samples = [sample for group in scheduler.buffer for sample in group.samples]
        speaking = [s.id for s in samples if s.turns and not s.awaits_environment and s.turn_ids(s.turns)]
        if not killed and (hit := victim._in_flight.intersection(speaking)):
            killed.extend(hit)
            os.kill(victim.process.pid, signal.SIGKILL)

    try:
        async with rollouts(world, pool, 6, 6, on_progress=kill, max_retries=100) as scheduler:
            found = {group.id: group for group in (await scheduler.next_batch()).groups}
    finally:
        await pool.close()
    assert killed
    same(found, undisturbed)
    assert set(world.steps.values()) == {1}, "each turn reached its environment once"


async def test_a_waiting_sample_keeps_its_kv_cache(policy: Any) -> None:
    """The turn after an observation prefills only the new tokens."""
    held = asyncio.Event()
    world = Low(slowness=0, trouble=lambda what: held.wait() if what.endswith("/0") else None)
    engine: Any = engine_of(policy, 8, 1)
    scheduler = rollouts(world, engine, 2)
    async with scheduler:
        collecting = asyncio.create_task(scheduler.next_batch())
        await asyncio.sleep(0)
        while scheduler.in_flight or not engine.paused:
            await asyncio.sleep(0.001)
        assert len(engine.paused) == len(scheduler.episodes) > 1
        missing = []
        submit = engine.submit

        def submitted(sample: Any) -> None:
            submit(sample)
            missing.append(engine._scheduler.in_flight[sample.id].missing)

        engine.submit = submitted
        held.set()
        await collecting
        assert max(missing) <= 1 + 3, "the last drawn token, and at most three of the environment"
