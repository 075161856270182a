from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import FixedAdmission, Prompt, RolloutBatch, Sample, SamplingParams
from april.rollout.admission.admission import Admission
from april.rollout.admission.auto import AutoAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.admission.ramp import RampedAdmission
from april.rollout.batch import Plan
from april.rollout.trajectory.group import Group
from tests.scheduling import scheduler_of
from tests.scripted_engine import ScriptedEngine


@given(st.integers(1, 50), st.integers(0, 100), st.integers(1, 12))
def test_it_begins_synchronous_and_grows_to_its_goal(batch_size: int, more: int, ramp_steps: int) -> None:
    goal = batch_size + more
    admission = RampedAdmission(FixedAdmission(goal), ramp_steps)
    targets = []
    for _ in range(ramp_steps + 2):
        targets.append(admission.plan(batch_size).target)
        saved = admission.state_dict()
        admission = RampedAdmission(FixedAdmission(goal), ramp_steps)
        admission.load_state_dict(saved)
        admission.observe(RolloutBatch(0, Plan(batch_size)))
    assert targets[0] == batch_size
    assert targets == sorted(targets)
    assert targets[ramp_steps:] == [goal, goal]
    assert max(b - a for a, b in itertools.pairwise(targets)) <= -(-more // ramp_steps), (
        "no step takes more than its share"
    )


def test_the_first_step_of_a_ramp_trains_on_every_group_that_was_begun() -> None:
    async def score(prompt: Prompt, sample: Sample) -> float:
        return 0.0

    async def steps(ramp_steps: int) -> list[list[int]]:
        prompts = (Prompt((1, i), f"prompt {i}") for i in itertools.count())
        settings = {"rollout_batch_size": 4, "over_sampling_batch_size": 8, "n_samples_per_prompt": 2}
        async with scheduler_of(ScriptedEngine(16, 3), prompts, score, **settings, ramp_steps=ramp_steps) as rollouts:
            collected = []
            for _ in range(3):
                collected.append([group.id for group in (await rollouts.next_batch()).groups])
                await rollouts.update_weights()
            return collected

    assert sorted(asyncio.run(steps(1))[0]) == [0, 1, 2, 3]
    assert sorted(asyncio.run(steps(0))[0]) != [0, 1, 2, 3], "without a ramp the quick ones of eight come first"


@pytest.mark.parametrize("before", ["fixed", "auto"])
@pytest.mark.parametrize("after", ["fixed", "auto"])
@pytest.mark.parametrize("ramps", [(3, 0), (3, 3), (0, 3)], ids=str)
def test_a_run_goes_on_with_another_admission_than_it_was_begun_with(
    before: str, after: str, ramps: tuple[int, int]
) -> None:
    def admission(kind: str, ramp_steps: int) -> Admission:
        auto = AutoAdmission(ScriptedEngine(), LengthModel(64), 2, 3)
        goal = FixedAdmission(9) if kind == "fixed" else auto
        return RampedAdmission(goal, ramp_steps) if ramp_steps else goal

    begun = admission(before, ramps[0])
    begun.observe(RolloutBatch(0, Plan(3), groups=[Group.start(0, Prompt((1,), "p"), 2, SamplingParams(), 0)]))
    going_on = admission(after, ramps[1])
    going_on.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert 3 <= going_on.plan(3).target <= 9


def test_a_run_that_was_begun_without_a_ramp_goes_on_at_its_goal() -> None:
    admission = RampedAdmission(FixedAdmission(9), 4)
    admission.load_state_dict(FixedAdmission(9).state_dict())
    assert admission.plan(3).target == 9
