"""Rewards of samples: text goes to the user's function, and what fails is counted and said."""

from __future__ import annotations

from typing import Any

import pytest

from april.config.settings import RolloutSettings
from april.rollout.rewards import RewardError
from april.rollout.sampling import SamplingParams
from april.rollout.threads import HangingError
from april.rollout.trajectory import Group, Prompt
from april.tasks.scoring import SpecScorer
from april.tasks.task import TaskSpec
from april.training.task_reward import Rewards

FUNCTION = """
import asyncio, time

async def patient(response, answer):
    await asyncio.sleep(1e9 if response == "hang" else 0)
    return 2.0

def score(response, answer):
    if response == "hang":
        time.sleep(1e9)
    return 1 / (response != "zero")
"""


class Words:
    """A tokenizer of three words."""

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return " ".join(("fine", "hang", "zero")[token] for token in token_ids)


@pytest.fixture(autouse=True)
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_hanging_rewards.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)


def groups(*responses: int) -> list[Group]:
    """A group of one sample for each response."""
    prompt = Prompt((0,), "p1", {"prompt": "?", "answer": None, "metadata": {}})
    made = [Group.start(i, prompt, 1, SamplingParams(), 0) for i in range(len(responses))]
    for group, response in zip(made, responses, strict=True):
        group.samples[0].extend([response], [0.0], 0)
    return made


def rewards(function: str = "score", **settings: Any) -> Rewards:
    scorer = SpecScorer(TaskSpec("reasoning_gym", "gcd", reward=f"my_hanging_rewards:{function}"))
    return Rewards(scorer, Words(), RolloutSettings(**settings))


async def test_what_fails_in_evaluation_scores_0_and_is_counted_and_said_once(caplog):
    async with rewards(on_reward_error="zero", reward_timeout=1.0) as subject:
        scored = await subject.score_groups(groups(0, 1, 2, 0, 2))
    assert scored == [[1.0], [0.0], [0.0], [1.0], [0.0]]
    assert subject.failures == {"TimeoutError": 1, "ZeroDivisionError": 2}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert any("'p1': TimeoutError" in line and "time limit of 1 s" in line for line in said)
    assert any("'p1': ZeroDivisionError" in line and "on_reward_error = 'zero'" in line for line in said)


@pytest.mark.parametrize(("function", "value"), [("score", 1.0), ("patient", 2.0)])
async def test_what_hangs_in_this_process_fails_at_its_time_limit_and_the_others_are_scored(
    function: str, value: float
) -> None:
    async with rewards(function, reward_workers=0, on_reward_error="zero", reward_timeout=0.2) as subject:
        assert await subject.score_groups(groups(0, 1, 0)) == [[value], [0.0], [value]]
        (group,) = groups(1)
        with pytest.raises(TimeoutError, match=r"time limit of 0.2 s .* leave out reward_workers = 0"):
            await subject(group.prompt, group.samples[0])
        assert subject.failures == {"TimeoutError": 2}
        await subject.score_groups(groups(*[1] * 6))
        with pytest.raises(HangingError, match=r"8 calls hang already: .* leave out reward_workers = 0"):
            await subject(group.prompt, group.samples[0])


async def test_a_failure_in_evaluation_that_is_to_stop_the_run_names_the_prompt():
    async with rewards(reward_workers=0) as subject:
        with pytest.raises(RewardError, match="held-out prompt 'p1': ZeroDivisionError"):
            await subject.score_groups(groups(2))


async def test_every_part_of_a_reward_is_kept_with_the_sample():
    weights = {"my_hanging_rewards:score": 1.0, "april.tasks.length:per_thousand": 100.0}
    scorer = SpecScorer(TaskSpec("reasoning_gym", "gcd", rewards=weights))
    (group,) = groups(0)
    async with Rewards(scorer, Words(), RolloutSettings(reward_workers=0)) as subject:
        reward = await subject(group.prompt, group.samples[0])
    assert (reward.value, reward.info) == (pytest.approx(0.9), {"score": 1.0, "per_thousand": -0.001})
