"""Rewards of samples: text goes to the user's function, and failures are counted and reported."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from april.config.settings.rollout_settings import RolloutSettings
from april.rollout.rewards import RewardError
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.user_code.user_code import HangingError
from april.tasks.scoring import SpecScorer
from april.tasks.task import TaskSpec
from april.training.task_reward import TaskRewards

FUNCTION = """
import asyncio, sys, threading, time

client = None
go = threading.Event()

async def patient(response, answer):
    await asyncio.sleep(1e9 if response == "hang" else 0)
    return 2.0

async def together(response, answer):
    "A client that lives on from call to call, and that twenty calls use at a time."
    global client
    client = client or asyncio.Barrier(20)
    await client.wait()
    return 3.0

async def blocks(response, answer):
    go.wait()
    return 4.0

async def gives_up(response, answer):
    raise TimeoutError

async def fails(response, answer):
    raise KeyError(response)

def exits(response, answer):
    sys.exit(0)

async def exits_async(response, answer):
    sys.exit(0)

async def exits_in_a_task(response, answer):
    await asyncio.create_task(exits_async(response, answer))

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
    monkeypatch.delitem(sys.modules, "my_hanging_rewards", raising=False)


def groups(*responses: int) -> list[Group]:
    """A group of one sample for each response."""
    prompt = Prompt((0,), "p1", {"prompt": "?", "answer": None, "metadata": {}})
    made = [Group.start(i, prompt, 1, SamplingParams(), 0) for i in range(len(responses))]
    for group, response in zip(made, responses, strict=True):
        group.samples[0].extend([response], [0.0], 0)
    return made


def rewards(function: str = "score", **settings: Any) -> TaskRewards:
    scorer = SpecScorer(TaskSpec("reasoning_gym", "gcd", reward=f"my_hanging_rewards:{function}"))
    return TaskRewards(scorer, Words(), RolloutSettings(**settings))


async def test_a_failed_reward_in_evaluation_scores_0_and_is_counted_and_logged_once(caplog):
    async with rewards(on_reward_error="zero", reward_timeout=1.0) as subject:
        scored = await subject.score_groups(groups(0, 1, 2, 0, 2))
    assert scored == [[1.0], [0.0], [0.0], [1.0], [0.0]]
    assert subject.failures == {"TimeoutError": 1, "ZeroDivisionError": 2}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert any("'p1': TimeoutError" in line and "time limit of 1 s" in line for line in said)
    assert any("'p1': ZeroDivisionError" in line and "on_reward_error = 'zero'" in line for line in said)


async def test_hanging_calls_fail_at_their_time_limit_up_to_a_maximum_number() -> None:
    async with rewards(reward_workers=0, on_reward_error="zero", reward_timeout=1.0) as subject:
        assert await subject.score_groups(groups(0, *[1] * 7, 0)) == [[1.0], *[[0.0]] * 7, [1.0]]
        (group,) = groups(1)
        with pytest.raises(TimeoutError, match=r"time limit of 1 s .* leave out reward_workers = 0"):
            await subject(group.prompt, group.samples[0])
        assert subject.failures == {"TimeoutError": 8}
        with pytest.raises(HangingError, match=r"8 calls hang already: .* leave out reward_workers = 0"):
            await subject(group.prompt, group.samples[0])
        with pytest.raises(RewardError, match="8 calls hang already"):
            await subject.score_groups(groups(0))


async def test_hanging_async_functions_are_cancelled_and_affect_no_other_call(caplog) -> None:
    async with rewards("patient", reward_workers=0, on_reward_error="zero", reward_timeout=1.0) as subject:
        assert await subject.score_groups(groups(*[1] * 20, 0)) == [*[[0.0]] * 20, [2.0]]
        assert subject.failures == {"TimeoutError": 20}
        assert "time limit of 1 s (rollout.reward_timeout) and was cancelled" in caplog.text
        assert await subject.score_groups(groups(0)) == [[2.0]]


async def test_async_functions_share_one_event_loop_without_a_limit() -> None:
    async with rewards("together", reward_workers=0) as subject:
        for _ in range(2):
            assert await subject.score_groups(groups(*[0] * 20)) == [[3.0]] * 20


async def test_an_async_function_that_blocks_the_event_loop_is_named() -> None:
    async with rewards("blocks", reward_workers=0, reward_timeout=1.0) as subject:
        (group,) = groups(0)
        with pytest.raises(HangingError, match="does not await but blocks"):
            await subject(group.prompt, group.samples[0])
    sys.modules["my_hanging_rewards"].go.set()
    async with rewards("blocks", reward_workers=0, reward_timeout=None) as subject:
        assert await subject(group.prompt, group.samples[0]) == Reward(4.0)


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_timeout_raised_by_the_reward_is_not_its_time_limit(workers: int) -> None:
    async with rewards("gives_up", reward_workers=workers, reward_timeout=None) as subject:
        (group,) = groups(0)
        with pytest.raises(TimeoutError) as error:
            await subject(group.prompt, group.samples[0])
        assert str(error.value) == ""


async def test_a_failure_in_evaluation_that_is_to_stop_the_run_names_the_prompt():
    async with rewards(reward_workers=0) as subject:
        with pytest.raises(RewardError, match="held-out prompt 'p1': ZeroDivisionError"):
            await subject.score_groups(groups(2))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("function", "error"), [("score", "ZeroDivisionError: division by zero"), ("fails", "KeyError: 'zero'")]
)
async def test_a_failure_names_the_line_of_the_users_file(workers: int, function: str, error: str) -> None:
    source = "    return 1 / (response" if function == "score" else "    raise KeyError"
    line = 1 + next(i for i, text in enumerate(FUNCTION.splitlines()) if text.startswith(source))
    async with rewards(function, reward_workers=workers) as subject:
        with pytest.raises(RewardError, match=re.escape(f"{error} (my_hanging_rewards.py, line {line})")):
            await subject.score_groups(groups(2))


async def test_every_part_of_a_reward_is_kept_with_the_sample():
    weights = {"my_hanging_rewards:score": 1.0, "april.tasks.length:per_thousand": 100.0}
    scorer = SpecScorer(TaskSpec("reasoning_gym", "gcd", rewards=weights))
    (group,) = groups(0)
    async with TaskRewards(scorer, Words(), RolloutSettings(reward_workers=0)) as subject:
        reward = await subject(group.prompt, group.samples[0])
    assert (reward.value, reward.info) == (pytest.approx(0.9), {"score": 1.0, "per_thousand": -0.001})


@pytest.mark.parametrize("function", ["exits", "exits_async", "exits_in_a_task"])
async def test_a_function_that_exits_is_a_failure_and_ends_no_run(function: str) -> None:
    settings = {"reward_workers": 0, "reward_timeout": 20.0, "on_reward_error": "zero"}
    async with rewards(function, **settings) as scored:
        assert await scored.score_groups(groups(0, 0)) == [[0.0], [0.0]]
    async with rewards("patient", reward_workers=0, reward_timeout=20.0) as scored:
        assert await scored.score_groups(groups(0)) == [[2.0]]
    async with rewards(function, reward_workers=0) as scored:
        with pytest.raises(RewardError, match=r"prompt 'p1': SystemExit: 0 \(my_hanging_rewards.py, line \d+\)"):
            await scored.score_groups(groups(0))


class Letters:
    """A tokenizer of characters, with a special token."""

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)


def written(*responses: str, prompt: str = "?") -> Group:
    """A group of these responses to a problem of countdown, whose scorer hangs on towers of powers."""
    metadata = {"prompt": prompt, "answer": "1+1", "metadata": {"numbers": [1, 1], "target": 2}}
    group = Group.start(0, Prompt((1,), "p", metadata), len(responses), SamplingParams(max_tokens=99), seed=1)
    for sample, text in zip(group.samples, responses, strict=True):
        sample.extend([ord(letter) for letter in text], [0.0] * len(text), 0)
    return group


async def test_a_response_on_which_aprils_own_scorer_hangs_scores_0_and_is_counted(caplog) -> None:
    """With any `on_reward_error`, and together with a user's function, which is still called."""
    weights = {"task": 1.0, "my_hanging_rewards:score": 0.5}
    scorer = SpecScorer(TaskSpec("reasoning_gym", "countdown", rewards=weights))
    group = written("<answer>9**9**9**9</answer>", "<answer>1+1</answer>")
    async with TaskRewards(scorer, Letters(), RolloutSettings(reward_timeout=4.0, reward_workers=2)) as subject:
        assert await subject.score_groups([group]) == [[0.5, 1.5]]
        assert subject.take_unjudged() == 1
        assert subject.take_unjudged() == 0
        assert subject.failures == {"TimeoutError": 1}
    assert "a response could not be scored and got 0, last on prompt 'p': TimeoutError" in caplog.text


@pytest.mark.parametrize("keep", [False, True])
async def test_special_tokens_are_stripped_by_default(keep: bool) -> None:
    spec = TaskSpec("reasoning_gym", "gcd", reward="builtins:len", keep_special_tokens=keep)
    group = written("four\0")
    async with TaskRewards(SpecScorer(spec), Letters(), RolloutSettings(reward_workers=0)) as subject:
        assert await subject.score_groups([group]) == [[5.0 if keep else 4.0]]
