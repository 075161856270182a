from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import EngineError, FaultSettings, Group, Prompt, RolloutBatch, RolloutParams, Sample, SamplingParams
from april.integrations.adapter import RolloutAdapter
from tests.scripted_engine import ScriptedEngine, response


class Numbered:
    """A stream of prompts that remembers its position."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.position = 0

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            self.position += 1
            yield prompt(self.kind, self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def prompt(kind: str, number: int) -> Prompt:
    return Prompt((1, 2, number), f"{kind} {number}", {"kind": kind, "number": number})


CASES = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "more": st.integers(0, 8),
        "group_size": st.integers(1, 4),
        "max_staleness": st.one_of(st.none(), st.integers(0, 3)),
        "slots": st.integers(1, 20),
        "seed": st.integers(0, 1000),
        "failure_rate": st.sampled_from([0.0, 0.05]),
        "filtered": st.booleans(),
        "calls": st.lists(st.sampled_from(["train", "evaluate", "restart"]), min_size=4, max_size=10),
    }
)


def build(case: dict[str, Any], engine: ScriptedEngine | None = None) -> RolloutAdapter:
    batch_size, bound = case["batch_size"], case["max_staleness"]
    target = batch_size + case["more"]
    return RolloutAdapter(
        engine or ScriptedEngine(case["slots"], case["seed"], case["failure_rate"]),
        RolloutParams(
            rollout_batch_size=batch_size,
            over_sampling_batch_size=target if bound is None else min(target, batch_size * (bound + 1)),
            n_samples_per_prompt=case["group_size"],
            max_staleness=bound,
        ),
        extra=Numbered("extra"),
        sampling=SamplingParams(max_tokens=60),
        dynamic_filter=(lambda group: sum(x.length for x in group.samples) % 3 > 0) if case["filtered"] else None,
        faults=FaultSettings(max_retries=20, retry_delay=0.0),
        seed=case["seed"],
    )


@given(CASES)
@settings(max_examples=120, deadline=None)
def test_n_prompts_in_n_complete_groups_out(case: dict[str, Any]) -> None:
    """Exact counts, own prompts, every prompt begun once and in order, across evaluations and restarts."""
    asyncio.run(serve(case))


async def serve(case: dict[str, Any]) -> None:
    adapter = build(case)
    batch_size, engine = case["batch_size"], adapter.scheduler.engine
    returned: list[Group] = []
    rejected: list[int] = []
    for call in case["calls"]:
        if call == "restart":
            state = json.loads(json.dumps(adapter.state_dict()))
            await adapter.close()
            adapter = build(case, engine)
            adapter.load_state_dict(state)
        elif call == "evaluate":
            before = adapter.state_dict()
            held_out = [prompt("held out", number) for number in range(3)]
            groups = await adapter.evaluate(held_out, 2)
            assert [group.prompt for group in groups] == held_out
            assert all(group.complete and len(group.samples) == 2 for group in groups)
            assert adapter.state_dict() == before, "evaluation changed the buffer"
        else:
            position = adapter.prompts.requested
            step = await adapter.rollout([prompt("asked", position + i) for i in range(batch_size)])
            assert len(step.groups) == batch_size
            for group in step.groups:
                assert group.complete
                assert len(group.samples) == case["group_size"]
                for sample in group.samples:
                    assert sample.prompt_ids == group.prompt.token_ids
                    assert sample.response_ids == response(sample.seed, 60)
            returned += step.groups
            rejected += [id for id, _ in step.rejections]
            await adapter.update_weights()

    waiting = list(adapter.scheduler.buffer)
    ids = [group.id for group in [*returned, *waiting]] + rejected
    assert sorted(ids) == list(range(adapter.scheduler.buffer.admitted))
    seen = {(g.prompt.metadata["kind"], g.prompt.metadata["number"]): g.id for g in [*returned, *waiting]}
    assert len(seen) == len(returned) + len(waiting), "a prompt was begun twice"
    queued = [("asked", p.metadata["number"]) for p in adapter.prompts.queue]
    for kind, count in (("asked", adapter.prompts.requested), ("extra", adapter.prompts.extra_drawn)):
        admitted = sorted((number, id) for (k, number), id in seen.items() if k == kind)
        assert [id for _, id in admitted] == sorted(id for _, id in admitted), "prompts were begun out of order"
        if not case["filtered"]:
            begun = [(kind, number) for number, _ in admitted]
            assert begun + [q for q in queued if q[0] == kind] == [(kind, number) for number in range(count)]
    if not case["filtered"] and adapter.prompts.requested:
        assert adapter.prompts.extra_drawn == adapter.scheduler.state.admission.plan(batch_size).target - batch_size


@given(CASES)
@settings(max_examples=40, deadline=None)
def test_a_restored_adapter_returns_the_same_groups(case: dict[str, Any]) -> None:
    async def run(restart: bool) -> list[list[dict[str, Any]]]:
        adapter = build(case)
        engine = adapter.scheduler.engine
        steps = []
        for number in range(6):
            if number == 3:
                engine.rng.seed(5)  # a restarted engine divides its tokens into different chunks
                if restart:
                    state = json.loads(json.dumps(adapter.state_dict()))
                    adapter = build(case, engine)
                    adapter.load_state_dict(state)
            position = adapter.prompts.requested
            asked = [prompt("asked", position + i) for i in range(case["batch_size"])]
            steps.append([group.to_dict() for group in (await adapter.rollout(asked)).groups])
            await adapter.update_weights()
        return steps

    assert asyncio.run(run(False)) == asyncio.run(run(True))


def adapter(engine: ScriptedEngine, **settings: Any) -> RolloutAdapter:
    params = RolloutParams(rollout_batch_size=3, over_sampling_batch_size=6, n_samples_per_prompt=2)
    sampling = SamplingParams(max_tokens=60)
    return RolloutAdapter(engine, params, **{"extra": Numbered("extra"), "sampling": sampling, **settings})


ASKED = [prompt("asked", number) for number in range(12)]


async def test_only_the_first_call_draws_extra_prompts() -> None:
    async with adapter(ScriptedEngine()) as rollouts:
        for call in range(4):
            await rollouts.rollout(ASKED[3 * call : 3 * call + 3])
            assert rollouts.prompts.extra_drawn == 3
            await rollouts.update_weights()


async def test_without_extra_prompts_rollouts_are_synchronous() -> None:
    async with adapter(ScriptedEngine(), extra=()) as rollouts:
        for call in range(3):
            asked = ASKED[3 * call : 3 * call + 3]
            step = await rollouts.rollout(asked)
            assert [group.prompt for group in step.groups] == asked
            assert step.off_policy_token_share == 0
            await rollouts.update_weights()


async def test_a_call_of_the_wrong_size_is_refused_before_any_submission() -> None:
    async with adapter(ScriptedEngine()) as rollouts:
        with pytest.raises(ValueError, match="2 prompts were requested where rollout_batch_size = 3"):
            await rollouts.rollout(ASKED[:2])
        assert rollouts.prompts.requested == 0
        assert not len(rollouts.scheduler.buffer)


async def test_a_failed_call_resumes_without_taking_new_prompts() -> None:
    engine = ScriptedEngine()
    async with adapter(engine) as rollouts:
        await rollouts.rollout(ASKED[:3])
        engine.dead = True
        with pytest.raises(EngineError):
            await rollouts.rollout(ASKED[3:6])
        engine.dead = False
        engine.flight.clear()
        step = await rollouts.next_batch()
        assert len(step.groups) == 3
        assert rollouts.prompts.requested == 6
        assert rollouts.prompts.extra_drawn == 3


async def test_weights_get_a_new_version_after_a_batch_and_the_current_one_before_it() -> None:
    engine = ScriptedEngine()
    async with adapter(engine) as rollouts:
        versions = []
        for prompts in (ASKED[:3], ASKED[3:6]):
            await rollouts.follow_weights()
            await rollouts.follow_weights()
            versions.append(rollouts.version)
            await rollouts.rollout(prompts)
        state = rollouts.state_dict()
    async with adapter(engine) as rollouts:
        rollouts.load_state_dict(state)
        await rollouts.follow_weights()
        versions.append(rollouts.version)
    assert versions == [0, 1, 2]


async def test_concurrent_calls_are_serialised() -> None:
    async with adapter(ScriptedEngine()) as rollouts:
        first, held_out, second = await asyncio.gather(
            rollouts.rollout(ASKED[:3]), rollouts.evaluate(ASKED[9:]), rollouts.rollout(ASKED[3:6])
        )
        assert len(first.groups) == len(second.groups) == len(held_out) == 3
        assert not {group.id for group in first.groups} & {group.id for group in second.groups}


async def test_rewards_of_the_caller_are_computed_during_generation() -> None:
    async def score(prompt: Prompt, sample: Sample) -> float:
        return float(prompt.metadata["number"])

    async with adapter(ScriptedEngine(), reward=score) as rollouts:
        step = await rollouts.rollout(ASKED[:3])
        for group in step.groups:
            assert [sample.reward for sample in group.samples] == [float(group.prompt.metadata["number"])] * 2


async def test_metrics_are_plain_numbers() -> None:
    steps: list[RolloutBatch] = []
    async with adapter(ScriptedEngine()) as rollouts:
        for call in range(4):
            steps.append(await rollouts.rollout(ASKED[3 * call : 3 * call + 3]))
            await rollouts.update_weights()
    for step in steps:
        metrics = step.metrics()
        assert json.loads(json.dumps(metrics)) == metrics
    assert steps[0].metrics()["off_policy_token_share"] == 0
    assert max(step.metrics()["staleness_max"] for step in steps) > 0
    assert sum(step.metrics()["samples_resumed"] for step in steps) > 0
