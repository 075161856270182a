"""A task's scorer as the scheduler's reward function: tokens become text here and nowhere else."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from april.config.settings import RolloutSettings
from april.rollout.rewards import THREADS, RewardError
from april.rollout.threads import Threads
from april.rollout.trajectory import Group, Prompt, Reward, Sample
from april.tasks.isolation import STATM, RewardWorkers
from april.tasks.task import Problem, Scorer

REMEDY = "no thread can be stopped: leave out reward_workers = 0, for processes that can be"

logger = logging.getLogger(__name__)


class Rewards:
    """Scores samples with a task's scorer, in worker processes or in this one. An async context manager.

    Attributes:
        failures: calls that failed so far, by the name of the exception: TimeoutError, WorkerDied, MemoryError, what
            the function raised; those of evaluations included.
    """

    def __init__(self, scorer: Scorer, tokenizer: Any, settings: RolloutSettings) -> None:
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.scope = scorer.scope
        self._on_error = settings.on_reward_error
        self._workers = None if settings.reward_workers == 0 else _workers(scorer, settings)
        self._threads = Threads(THREADS, REMEDY)
        self._time_limit = settings.reward_timeout
        self.failures: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Calls that wait for a worker process."""
        return 0 if self._workers is None else self._workers.waiting

    async def __call__(self, prompt: Prompt, samples: Sample | Sequence[Sample]) -> Any:
        """The reward of a sample, or of each sample of a group."""
        several = not isinstance(samples, Sample)
        rewards = await self.score(prompt, samples if several else [samples])  # type: ignore[arg-type, list-item]
        return rewards if several else rewards[0]

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        problem = Problem.of(prompt)
        responses = [self.tokenizer.decode(sample.response_ids, skip_special_tokens=True) for sample in samples]
        lengths = [sample.policy_tokens for sample in samples]
        try:
            call = self._in_this_process if self._workers is None else self._workers
            rewards: list[Reward] = await call(problem, responses, lengths)
            return rewards
        except Exception as error:
            self._count(problem, error)
            raise

    async def _in_this_process(self, *args: Any) -> list[Reward]:
        """In a thread, in which an async function gets an event loop of its own."""
        try:
            rewards: list[Reward] = await self._threads.call(self.scorer, args, self._time_limit)
            return rewards
        except TimeoutError:
            raise TimeoutError(
                f"the reward function ran past its time limit of {self._time_limit:g} s (rollout.reward_timeout) in "
                f"this process; {REMEDY}"
            ) from None

    def _count(self, problem: Problem, error: Exception) -> None:
        """Failures that do not stop the run are said aloud all the same: the first of a kind, the 10th, the 100th."""
        kind = type(error).__name__
        self.failures[kind] += 1
        times = self.failures[kind]
        if self._on_error != "raise" and times in (1, 10, 100, 1000):
            logger.warning(
                "the reward function failed %s, last on prompt %r: %s: %s (on_reward_error = %r)",
                "once" if times == 1 else f"{times} times",
                problem.id,
                kind,
                error,
                self._on_error,
            )

    async def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """The rewards of complete groups, for evaluation.

        Raises:
            RewardError: the reward function failed and `on_reward_error` is "raise"; else such samples score 0.
        """
        return list(await asyncio.gather(*map(self._score_group, groups)))

    async def _score_group(self, group: Group) -> list[float]:
        try:
            return [reward.value for reward in await self.score(group.prompt, group.samples)]
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
