"""Reward of an episode: the sum of its environment's rewards, optionally plus the task's reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample
from april.training.task_reward import TaskRewards


class EpisodeRewards:
    """Reward function for episodes, used instead of `TaskRewards`.

    The reward's `info` is the info of the environment's last step and the number of turns.

    Args:
        task: the task's reward, which is added; None for only the environment's rewards.
    """

    scope: Literal["sample"] = "sample"
    waiting = 0

    def __init__(self, task: TaskRewards | None = None) -> None:
        self.task = task
        self.failures: Counter[str] = Counter() if task is None else task.failures

    def take_unjudged(self) -> int:
        """See `TaskRewards.take_unjudged`."""
        return 0 if self.task is None else self.task.take_unjudged()

    async def __call__(self, prompt: Prompt, sample: Sample) -> Reward:
        given = sum(transition.reward for transition in sample.transitions)
        info: dict[str, Any] = dict(sample.transitions[-1].info) if sample.transitions else {}
        if self.task is not None:
            own = await self.task(prompt, sample)
            given, info = given + own.value, {**info, **own.info, "environment": given}
        # The sample is one sequence of a program's episode, whose end holds the turns of all sequences.
        turns = info.get("turns", sample.turns) if sample.origin is not None else sample.turns
        return Reward(given, {**info, "turns": turns})

    async def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the rewards of complete groups, for evaluation."""
        return [[(await self(group.prompt, sample)).value for sample in group.outcomes] for group in groups]

    async def __aenter__(self) -> EpisodeRewards:
        if self.task is not None:
            await self.task.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.task is not None:
            await self.task.__aexit__(*error)
