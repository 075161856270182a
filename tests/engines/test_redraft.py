"""Responses sampled under older weights are drafts under new weights, which draw every token that is kept."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import Prompt, RolloutBatch, RolloutParams, RolloutScheduler, Sample, SamplingParams
from april.engines.embedded import EmbeddedEngine
from april.rollout.journal.journal import Journal
from tests.engines.architectures import append, assert_behaviour, model, perturb, responses, run, samples

BASE = model()
SAMPLING = SamplingParams(max_tokens=40, temperature=0.6, stop_token_ids=(7, 11))


def policy_after(updates: int) -> Any:
    """Return the policy after `updates` updates."""
    policy = copy.deepcopy(BASE)
    for update in range(updates):
        perturb(policy, update)
    return policy


class Counted:
    """A stream of prompts that remembers its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Prompt:
        self.position += 1
        return Prompt(tuple(1 + (self.position * k) % 50 for k in range(2, 6)), str(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def scheduler(
    policy: Any, journal: Journal | None = None, target: int = 6, sampling: SamplingParams = SAMPLING, **engine: Any
) -> RolloutScheduler:
    async def score(prompt: Prompt, sample: Sample) -> float:
        for _ in range(sample.seed % 3):
            await asyncio.sleep(0)
        return float(sample.length)

    return RolloutScheduler(
        EmbeddedEngine(policy, **{"kv_cache_bytes": 1 << 24, "max_num_seqs": 8, "stream_interval": 2, **engine}),
        Counted(),
        score,
        RolloutParams(rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=target, redraft=True),
        sampling=sampling,
        journal=journal,
    )


async def steps_of(rollouts: RolloutScheduler, policy: Any, versions: range) -> list[RolloutBatch]:
    """A step under each version, whose weights come behind it."""
    steps = []
    for version in versions:
        steps.append(await rollouts.next_batch())
        perturb(policy, version)
        await rollouts.update_weights()
    return steps


async def test_a_verified_response_takes_few_passes() -> None:
    """Under the same weights a draft holds to its end, be it finished or not."""
    engine = EmbeddedEngine(BASE, kv_cache_bytes=1 << 24, max_num_seqs=9)
    done = await run(engine, samples())
    before = responses(done)
    for sample in done:
        sample.redraft()
        assert (sample.length, sample.finish) == (0, None)
        engine.submit(sample)
    polls = 0
    while chunks := await engine.poll():
        append(done, chunks)
        polls += 1
    assert responses(done) == before
    assert_behaviour(BASE, done)
    assert polls <= 6, "prompts, then all drafts, and what did not fit beside them"


@settings(max_examples=10, deadline=None)
@given(
    target=st.integers(2, 9),
    max_num_seqs=st.integers(1, 12),
    kv_cache_bytes=st.sampled_from([1 << 24, 200_000, 110_000]),
    stream_interval=st.integers(1, 9),
    prefill_chunk=st.sampled_from([3, 17, 1024]),
)
def test_every_step_contains_the_tokens_of_its_own_weights(**config: Any) -> None:
    async def schedule() -> None:
        policy = policy_after(0)
        rollouts = scheduler(policy, **config)
        async with rollouts:
            steps = await steps_of(rollouts, policy, range(4))
            rollouts.buffer.check()
        for version, step in enumerate(steps):
            trained = [sample for group in step.groups for sample in group.samples]
            assert step.staleness.tolist() == [0, 0]
            assert {v for sample in trained for v in sample.versions.tolist()} == {version}
            weights = policy_after(version)
            assert_behaviour(weights, trained)
            anew = [Sample(s.group_id, s.index, s.prompt_ids, SAMPLING, s.seed) for s in trained]
            await run(EmbeddedEngine(weights, kv_cache_bytes=1 << 24), anew)
            assert responses(trained) == responses(anew)

    asyncio.run(schedule())


def content(steps: list[RolloutBatch]) -> Any:
    return [[group.to_dict() for group in step.groups] for step in steps]


async def test_a_checkpoint_keeps_drafts() -> None:
    policy = policy_after(0)
    async with scheduler(policy) as rollouts:
        expected = content(await steps_of(rollouts, policy, range(4)))
    policy = policy_after(0)
    async with scheduler(policy) as rollouts:
        found = await steps_of(rollouts, policy, range(2))
        state = json.loads(json.dumps(rollouts.state_dict()))
    policy = policy_after(2)
    async with scheduler(policy) as rollouts:
        rollouts.load_state_dict(state)
        await rollouts.update_weights(version=rollouts.engine_version)
        assert any(sample.draft for group in rollouts.buffer for sample in group.samples)
        found += await steps_of(rollouts, policy, range(2, 4))
    assert content(found) == expected


async def test_a_replay_restores_the_drafts(tmp_path: Path) -> None:
    policy = policy_after(0)
    journal = Journal(tmp_path / "journal", flush_seconds=0)
    async with scheduler(policy, journal) as rollouts:
        died = await steps_of(rollouts, policy, range(3))
        state = json.loads(json.dumps(rollouts.state.state_dict()))
    journal.close()
    policy = policy_after(0)
    journal = Journal(tmp_path / "journal", flush_seconds=0)
    journal.seek(None)
    async with scheduler(policy, journal) as rollouts:
        again = await steps_of(rollouts, policy, range(3))
        assert json.loads(json.dumps(rollouts.state.state_dict())) == state
    journal.close()
    assert content(again) == content(died)


async def test_rewards_of_redrafted_responses_are_dropped() -> None:
    """All groups are complete at once, and the rewards of the surplus still being computed when the weights change."""
    policy = policy_after(0)
    begun, release = [], asyncio.Event()

    async def slow(prompt: Prompt, sample: Sample) -> float:
        begun.append(sample.id)
        if int(prompt.id) > 2:
            await release.wait()
        return float(sample.length)

    rollouts = scheduler(policy, sampling=SamplingParams(max_tokens=4), max_num_seqs=12)
    rollouts._loop.scoring.rewards.function = slow
    async with rollouts:
        await rollouts.next_batch()
        unfinished = {sample.id for group in rollouts.buffer for sample in group.samples}
        assert unfinished & set(begun), "the workload is meant to have rewards under way at the update"
        await rollouts.update_weights()
        release.set()
        for group in (await rollouts.next_batch()).groups:
            assert [sample.reward for sample in group.samples] == [float(sample.length) for sample in group.samples]


def test_redraft_needs_no_staleness_bound_and_no_forecast() -> None:
    with pytest.raises(ValueError, match=r"over_sampling_batch_size = 'auto'.*give a number"):
        RolloutParams(rollout_batch_size=2, redraft=True)
    params = RolloutParams(rollout_batch_size=2, over_sampling_batch_size=20, max_staleness=0, redraft=True)
    assert params.max_staleness is None
