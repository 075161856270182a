from __future__ import annotations

import logging

import pytest

from april import Prompt, RolloutScheduler, SamplingParams
from april.config.settings.rollout_settings import RolloutSettings
from april.rollout.params import RolloutParams
from april.rollout.trajectory.reward import Reward
from april.tasks.encoding import Encoder
from april.tasks.task import Problem, Split, Task
from april.training.held_out_evaluation import HeldOutEvaluation, held_out
from april.training.task_reward import TaskRewards
from tests import tiny
from tests.scripted_engine import ScriptedEngine


class Halves:
    """Every other response is right, and earns half a point."""

    scope, correct_at = "sample", None

    def __call__(self, problem: Problem, responses: list[str], lengths: object = None) -> list[Reward]:
        return [Reward(0.5 * (index % 2)) for index, _ in enumerate(responses)]


class Lengths(Task):
    """Held-out problems with prompts of 1, 2, 3 … tokens."""

    name, eval_size, scorer = "lengths", 4, Halves()

    def __len__(self) -> int:
        return 1

    def problem(self, index: int, split: Split = "train") -> Problem:
        return Problem(f"{split}/{index}", "x" * (index + 1))


def test_held_out_prompts_that_are_too_long_are_passed_over_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    task, encoder = Lengths(), Encoder(tiny.tokenizer())
    assert len(held_out(task, encoder, None)) == 4
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        kept = held_out(task, encoder, 2)
    assert [prompt.id for prompt in kept] == ["eval/0", "eval/1"]
    assert "2 of 4 held-out prompts are left out (max_prompt_length = 2): problem 'eval/2'" in caplog.text
    with pytest.raises(ValueError, match=r"'eval/0': .*\(4 of 4 held-out prompts cannot be used\)"):
        held_out(task, encoder, 0)


async def test_every_task_has_a_reward_and_accuracy_follows_the_tasks_definition() -> None:
    async def reward(prompt: Prompt, sample: object) -> float:
        return 0.0

    prompts = held_out(Lengths(), Encoder(tiny.tokenizer()), None)
    engine, params = ScriptedEngine(), RolloutParams(rollout_batch_size=1)
    async with (
        TaskRewards(Halves(), tiny.tokenizer(), RolloutSettings(reward_workers=0)) as rewards,
        RolloutScheduler(engine, iter(()), reward, params) as scheduler,
    ):
        sampling = SamplingParams(max_tokens=5)
        found, groups = await HeldOutEvaluation(scheduler, rewards, prompts, 2, sampling).run()
        assert found == {"eval_reward": 0.25}
        assert [[sample.reward for sample in group.samples] for group in groups] == [[0.0, 0.5]] * 4
        engine.ledger.clear()
        found, _ = await HeldOutEvaluation(scheduler, rewards, prompts, 2, sampling, lambda reward: reward >= 0.5).run()
        assert found == {"eval_reward": 0.25, "accuracy": 0.5}
