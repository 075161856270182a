"""A task's scorer as the scheduler's reward function: tokens become text here and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from april.config.settings import RolloutSettings
from april.rollout.rewards import RewardError
from april.rollout.trajectory import Group, Prompt, Sample
from april.tasks.isolation import STATM, RewardWorkers
from april.tasks.task import Problem, Scorer


class Rewards:
    """Scores samples with a task's scorer, in worker processes or in this one. An async context manager."""

    def __init__(self, scorer: Scorer, tokenizer: Any, settings: RolloutSettings) -> None:
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.scope = scorer.scope
        self._on_error = settings.on_reward_error
        self._workers = _workers(scorer, settings) if settings.reward_workers else None

    async def __call__(self, prompt: Prompt, samples: Sample | Sequence[Sample]) -> Any:
        """The reward of a sample, or of each sample of a group."""
        several = not isinstance(samples, Sample)
        rewards = await self.score(prompt, samples if several else [samples])  # type: ignore[arg-type, list-item]
        return rewards if several else rewards[0]

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        problem = Problem.of(prompt)
        responses = [self.tokenizer.decode(sample.response_ids, skip_special_tokens=True) for sample in samples]
        if self._workers is None:
            return self.scorer(problem, responses)
        rewards: list[float] = await self._workers(problem, responses)
        return rewards

    async def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """The rewards of complete groups, for evaluation.

        Raises:
            RewardError: the reward function failed and `on_reward_error` is "raise"; else such samples score 0.
        """
        return list(await asyncio.gather(*map(self._score_group, groups)))

    async def _score_group(self, group: Group) -> list[float]:
        try:
            return await self.score(group.prompt, group.samples)
        except Exception as error:
            if self._on_error != "raise":
                return [0.0] * len(group.samples)
            raise RewardError(
                f"the reward function failed on held-out prompt {group.prompt.id!r}: {type(error).__name__}: {error}"
            ) from None

    async def __aenter__(self) -> Rewards:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._workers is not None:
            await self._workers.close()


def _workers(scorer: Scorer, settings: RolloutSettings) -> RewardWorkers:
    limited = settings.reward_memory_gb is not None and STATM.exists()
    memory = int(settings.reward_memory_gb * 1e9) if limited else None  # type: ignore[operator]
    return RewardWorkers(scorer, settings.reward_workers, settings.reward_timeout, memory, settings.reward_env)
