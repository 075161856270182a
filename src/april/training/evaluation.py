"""What the policy does on held-out problems.

Invariants:
- the same problems get the same seeds each time, so two evaluations differ by the policy alone;
- evaluation goes past the buffer: it changes nothing that is trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory import Group, Prompt
from april.tasks.task import ChatTemplate, Task, encode
from april.training.episode_reward import EpisodeRewards
from april.training.task_reward import Rewards

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
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
    rewards: Rewards | EpisodeRewards
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
    tokenizer: Any,
    chat_template: ChatTemplate,
    limit: int | None,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """The task's held-out prompts; those of more than `limit` tokens are passed over, and counted in a warning.

    Raises:
        ValueError: none of them is short enough.
    """
    problems = (task.problem(i, "eval") for i in range(task.eval_size))
    prompts = [encode(problem, tokenizer, chat_template, template_arguments) for problem in problems]
    fitting = [prompt for prompt in prompts if limit is None or len(prompt.token_ids) <= limit]
    if prompts and not fitting:
        raise ValueError(f"max_prompt_length = {limit}: every held-out prompt of {task.name} is longer")
    if len(fitting) < len(prompts):
        longer = next(prompt for prompt in prompts if prompt not in fitting)
        log.warning(
            "%d of %d held-out prompts have more than max_prompt_length = %d tokens and are passed over; the first is "
            "%r with %d",
            len(prompts) - len(fitting),
            len(prompts),
            limit,
            longer.id,
            len(longer.token_ids),
        )
    return fitting
