"""Episodes of many turns on real servers: interrupted, under new weights, with a replica lost in mid-turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from april import Group, Prompt, RolloutBatch, RolloutScheduler, SamplingParams
from april.engines.member import Member
from april.engines.pool import EnginePool
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.segment import ENVIRONMENT
from tests.scheduling import scheduler_of
from tests.servers.conftest import CONTEXT, Connect
from tests.servers.proxy import FaultProxy
from tests.servers.test_engines import EXACT
from tests.servers.test_faults import prompts, until_ready
from tests.servers.tiny import Oracle
from tests.talking import Numbers, World, said_by_environment

SAMPLING = SamplingParams(120, temperature=1.5, stop_token_ids=tuple(range(2, 34)), max_turns=6)
STALENESS = 2


async def test_episodes_survive_updates_and_the_loss_of_a_replica_within_a_turn(
    connect: Connect, proxy: FaultProxy, oracles: list[Oracle], models: list[Path]
) -> None:
    pool = EnginePool([await connect(), await connect(proxy.url)], health_interval=0.3, health_timeout=10.0)
    world = World()
    async with scheduler(pool, world) as rollouts:
        steps = [await disturbed(rollouts, pool.members[1], proxy.close)]
        check(steps[-1], rollouts, oracles)
        await rollouts.update_weights(models[1])
        assert not pool.members[1].ready
        proxy.go_on()
        await until_ready(pool.members[1])
        for _ in range(STALENESS):
            steps.append(await rollouts.next_batch())
            check(steps[-1], rollouts, oracles)
            await rollouts.update_weights(models[1])
    samples = [sample for step in steps for group in step.groups for sample in group.samples]
    assert {*range(-1, 2)} <= {version for sample in samples for version in sample.versions}
    assert max(sample.turns for sample in samples) > 2
    assert set(world.steps.values()) == {1}, "each turn reached its environment once"
    await pool.close()


def scheduler(engine: EnginePool, world: World) -> RolloutScheduler:
    async def score(prompt: Prompt, sample: Sample) -> float:
        return sum(one.reward for one in sample.transitions)

    return scheduler_of(
        engine,
        prompts(),
        score,
        episodes=EnvironmentEpisodes(world, Numbers(), CONTEXT, EpisodeLimits(retry_delay=0.0)),
        rollout_batch_size=4,
        over_sampling_batch_size=8,
        n_samples_per_prompt=2,
        max_staleness=STALENESS,
        sampling=SAMPLING,
        max_retries=20,
    )


async def disturbed(rollouts: RolloutScheduler, replica: Member, disturb: Callable[[], None]) -> RolloutBatch:
    """The first step in whose middle the replica speaks a second turn, or a later one: then `disturb` is called."""
    while True:
        collecting = asyncio.ensure_future(rollouts.next_batch())
        while not collecting.done():
            running = (sample for sample in rollouts.buffer.samples if sample.id in replica.samples)
            if any(s.turns and not s.awaits_environment and s.turn_ids(s.turns) for s in running):
                disturb()
                return await collecting
            await asyncio.sleep(0)


def check(step: RolloutBatch, rollouts: RolloutScheduler, oracles: Sequence[Oracle]) -> None:
    """No token is lost or repeated, and every token has the place that its policy chose."""
    rollouts.buffer.check()
    assert step.staleness.max() <= STALENESS
    for group in step.groups:
        for sample in group.samples:
            assert sample.finish is not None
            heard(group, sample)
            own = np.flatnonzero(sample.versions != ENVIRONMENT)
            by_version = np.stack([oracle.logprobs(sample) for oracle in (oracles[0], *[oracles[1]] * STALENESS)])
            errors = by_version[sample.versions[own], own] - sample.logprobs[own]
            assert np.abs(errors).max(initial=0.0) < EXACT
            assert not sample.logprobs[sample.versions == ENVIRONMENT].any()


def heard(group: Group, sample: Sample) -> None:
    """Each turn ended with a stop token, and its observation follows from the whole conversation."""
    words = 0
    for index, one in enumerate(sample.transitions):
        if index:
            turn = sample.turn_ids(index - 1)
            assert turn[-1] in SAMPLING.stop_token_ids
            words += len(turn)
        observation, reward, done = said_by_environment(group.environment_seed, words)
        found = tuple(sample.response_ids[one.start : one.start + one.tokens])
        last = index + 1 == len(sample.transitions)
        assert found == observation or (last and not found)
        if index:
            assert (one.reward, one.done) == (reward, done)
