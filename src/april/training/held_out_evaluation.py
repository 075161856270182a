"""Evaluation of the policy on held-out problems.

Invariants:
- the same problems have the same seeds each time, so two evaluations differ only by the policy;
- evaluation does not use the rollout buffer, so it does not influence training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.tasks.encoding import Encoder
from april.tasks.inspection import inspect
from april.tasks.task import BadRecords, Task
from april.training.episode_reward import EpisodeRewards
from april.training.task_reward import TaskRewards


@dataclass(frozen=True, slots=True)
class HeldOutEvaluation:
    """Samples responses to held-out prompts and scores them.

    Args:
        scheduler: scheduler with the engine to use.
        rewards: reward function.
        prompts: held-out prompts; no evaluation without them.
        samples: number of samples per prompt.
        sampling: sampling parameters.
        correct: whether a response with a given reward is correct; None if the task does not define it.
    """

    scheduler: RolloutScheduler
    rewards: TaskRewards | EpisodeRewards
    prompts: Sequence[Prompt]
    samples: int
    sampling: SamplingParams
    correct: Callable[[float], bool] | None = None

    async def run(self) -> tuple[dict[str, float], list[Group]]:
        """Evaluate the engine's policy; return its mean reward, its accuracy if the task defines it, and the groups
        with their rewards."""
        groups = await self.scheduler.evaluate(self.prompts, self.samples, self.sampling)
        rewards = np.array(await self.rewards.score_groups(groups))
        for group, own in zip(groups, rewards.tolist(), strict=True):
            for sample, reward in zip(group.outcomes, own, strict=True):
                sample.reward = reward
        found = {"eval_reward": float(rewards.mean())}
        if self.correct is not None:
            found["accuracy"] = float(np.mean([self.correct(reward) for reward in rewards.flat]))
        return found, groups


def held_out(
    task: Task,
    encoder: Encoder,
    limit: int | None,
    on_bad_record: BadRecords = "raise",
    on_overlong: BadRecords = "skip",
) -> list[Prompt]:
    """Encode the task's held-out problems; unusable prompts raise an error or are skipped.

    Raises:
        ValueError: see `Inspection.settle`.
    """
    found = inspect(task, "eval", range(task.eval_size), encoder, limit)
    found.settle(on_bad_record, on_overlong, "held-out prompts")
    return list(found.prompts.values())
