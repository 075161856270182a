"""What the policy does on held-out problems.

Invariants:
- the same problems get the same seeds each time, so two evaluations differ by the policy alone;
- evaluation goes past the buffer: it changes nothing that is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory import Group, Prompt
from april.tasks.encoding import Encoder
from april.tasks.inspection import inspect
from april.tasks.task import BadRecords, Task
from april.training.episode_reward import EpisodeRewards
from april.training.task_reward import TaskRewards


@dataclass(frozen=True, slots=True)
class HeldOutEvaluation:
    """Samples responses to held-out prompts and scores them.

    Args:
        scheduler: whose engine samples.
        rewards: the task's.
        prompts: see `held_out`; with none there is nothing to evaluate.
        samples: of each prompt.
        sampling: how tokens are drawn.
        correct: whether a response with this reward is correct; None where the task does not say.
    """

    scheduler: RolloutScheduler
    rewards: TaskRewards | EpisodeRewards
    prompts: Sequence[Prompt]
    samples: int
    sampling: SamplingParams
    correct: Callable[[float], bool] | None = None

    async def run(self) -> tuple[dict[str, float], list[Group]]:
        """The mean reward of the policy that the engine has, its accuracy where the task defines one, and the groups
        it sampled, with their rewards."""
        groups = await self.scheduler.evaluate(self.prompts, self.samples, self.sampling)
        rewards = np.array(await self.rewards.score_groups(groups))
        for group, own in zip(groups, rewards.tolist(), strict=True):
            for sample, reward in zip(group.samples, own, strict=True):
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
    """Encode the task's held-out problems; prompts that cannot be used stop the run or are left out.

    Raises:
        ValueError: see `Inspection.settle`.
    """
    found = inspect(task, "eval", range(task.eval_size), encoder, limit)
    found.settle(on_bad_record, on_overlong, "held-out prompts")
    return list(found.prompts.values())
