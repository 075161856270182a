"""Reward function of the scheduler from a task's scorer. Responses are decoded to text only here."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from april.config.settings.rollout_settings import RolloutSettings
from april.rollout.rewards import THREADS, RewardError, described
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import HangingError, LateError, Threads, time_limit
from april.rollout.user_code.workers import STATM, WorkerDied
from april.tasks.isolation import RewardWorkers
from april.tasks.scoring import SpecScorer, reward_loop
from april.tasks.task import Problem, Scorer

if TYPE_CHECKING:
    from april.engines.ray.node_calls import NodeCalls

REMEDY = "no thread can be stopped: leave out reward_workers = 0, for processes that can be"

LOGGED = (1, 10, 100, 1000)
"""Counts of a kind of failure at which it is logged."""

logger = logging.getLogger(__name__)


class TaskRewards:
    """Scores samples with a task's scorer, in worker processes or in this one. An async context manager.

    Args:
        on_nodes: worker processes run on the nodes of a cluster, to which this process is connected before the first
            call.

    Attributes:
        failures: number of failed calls so far, including evaluations, by the exception's name: TimeoutError,
            WorkerDied, MemoryError, or an exception of the reward function.
    """

    def __init__(self, scorer: Scorer, tokenizer: Any, settings: RolloutSettings, on_nodes: bool = False) -> None:
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.scope = scorer.scope
        self._keep_special = isinstance(scorer, SpecScorer) and scorer.spec.keep_special_tokens
        self._on_error = settings.on_reward_error
        self._workers = None if settings.reward_workers == 0 else _workers(scorer, settings, on_nodes)
        self._threads = Threads(THREADS, REMEDY)
        self._time_limit = settings.reward_timeout
        self.failures: Counter[str] = Counter()
        self._unjudged = 0

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a worker process."""
        return 0 if self._workers is None else self._workers.waiting

    async def __call__(self, prompt: Prompt, samples: Sample | Sequence[Sample]) -> Any:
        """Return the reward of a sample, or of each sample of a group."""
        several = not isinstance(samples, Sample)
        rewards = await self.score(prompt, samples if several else [samples])  # type: ignore[arg-type, list-item]
        return rewards if several else rewards[0]

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        problem = Problem.of(prompt)
        responses = [self.tokenizer.decode(s.response_ids, skip_special_tokens=not self._keep_special) for s in samples]
        lengths = [sample.policy_tokens for sample in samples]
        scorer = self.scorer
        try:
            if not isinstance(scorer, SpecScorer):
                return await self._call(problem, responses, lengths)
            token_ids = [list(sample.response_ids) for sample in samples] if scorer.reads_token_ids else None
            if "own" not in scorer.kinds:
                return await self._call(problem, responses, lengths, token_ids)
            known = zip(responses, lengths, strict=True)
            # One call per response, so that a response that hangs april's own scorer loses only its own reward.
            rewards = await asyncio.gather(*(self._own(scorer, problem, *response) for response in known))
            if "function" not in scorer.kinds:
                return rewards
            others = await self._call(problem, responses, lengths, token_ids, "function")
            return [scorer.added(*both) for both in zip(rewards, others, strict=True)]
        except Exception as error:
            self._count(problem, error)
            raise

    async def _own(self, scorer: SpecScorer, problem: Problem, response: str, length: int) -> Reward:
        """Score one response by april's own scorers; the reward is 0 if they time out or die.

        A response must never end a run, for any `on_reward_error`.
        """
        try:
            [reward] = await self._call(problem, [response], [length], None, "own")
            return reward
        except (TimeoutError, WorkerDied) as error:
            self.failures[type(error).__name__] += 1
            self._unjudged += 1
            if (times := self.failures[type(error).__name__]) in LOGGED:
                logger.warning(
                    "%s could not be scored and got 0, last on prompt %r: %s",
                    "a response" if times == 1 else f"{times} responses",
                    problem.id,
                    described(error),
                )
            return scorer.zero()

    def take_unjudged(self) -> int:
        """Return the number of responses since the last call with reward 0 because april's own scorers did not
        finish."""
        unjudged, self._unjudged = self._unjudged, 0
        return unjudged

    async def _call(self, *args: Any) -> list[Reward]:
        call = self._in_this_process if self._workers is None else self._workers
        rewards: list[Reward] = await call(*args)
        return rewards

    async def _in_this_process(self, *args: Any) -> list[Reward]:
        """Score in a thread; async reward functions run in their own event loop and are cancelled at their time
        limit."""
        try:
            found: Any = await self._threads.call(self._begin, args, self._time_limit)
        except LateError:
            raise TimeoutError(f"{self._late()} in this process; {REMEDY}") from None
        try:
            if isinstance(found, Future):
                async with time_limit(self._time_limit):
                    found = await asyncio.wrap_future(found)
        except LateError:
            await self._loop_answers()
            raise TimeoutError(f"{self._late()} and was cancelled") from None
        rewards: list[Reward] = found
        return rewards

    def _begin(self, *args: Any) -> list[Reward] | Future[list[Reward]]:
        """Return the rewards, or a future of async functions' rewards; called in a thread."""
        if not isinstance(self.scorer, SpecScorer):
            return self.scorer(*args)
        found = self.scorer.begin(*args)
        return found if isinstance(found, list) else reward_loop().begin(found)

    def _late(self) -> str:
        return f"the reward function ran past its time limit of {self._time_limit:g} s (rollout.reward_timeout)"

    async def _loop_answers(self) -> None:
        """Check that no async reward function blocks the event loop.

        Raises:
            HangingError: a function blocks it.
        """
        try:
            async with time_limit(self._time_limit):
                await asyncio.wrap_future(reward_loop().begin(asyncio.sleep(0)))
        except LateError:
            raise HangingError(
                f"an async reward function does not await but blocks, for more than {self._time_limit:g} s "
                f"(rollout.reward_timeout), and all others with it; {REMEDY}"
            ) from None

    def _count(self, problem: Problem, error: Exception) -> None:
        """Count a failure. Failures that do not stop the run are logged: the first of a kind, the 10th, the 100th, …"""
        kind = type(error).__name__
        self.failures[kind] += 1
        times = self.failures[kind]
        if self._on_error != "raise" and times in LOGGED:
            logger.warning(
                "the reward function failed %s, last on prompt %r: %s (on_reward_error = %r)",
                "once" if times == 1 else f"{times} times",
                problem.id,
                described(error),
                self._on_error,
            )

    async def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the rewards of complete groups, for evaluation; samples whose reward function fails have reward 0.

        Raises:
            RewardError: the reward function failed and `on_reward_error` is "raise", or too many calls hang.
        """
        return list(await asyncio.gather(*map(self._score_group, groups)))

    async def _score_group(self, group: Group) -> list[float]:
        try:
            return [reward.value for reward in await self.score(group.prompt, group.outcomes)]
        except Exception as error:
            if self._on_error != "raise" and not isinstance(error, HangingError):
                return [0.0] * group.size
            raise RewardError(
                f"the reward function failed on held-out prompt {group.prompt.id!r}: {described(error)}"
            ) from None

    async def __aenter__(self) -> TaskRewards:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._workers is not None:
            await self._workers.close()


def _workers(scorer: Scorer, settings: RolloutSettings, on_nodes: bool) -> RewardWorkers | NodeCalls:
    if not on_nodes:
        return _on_this_machine(scorer, settings)
    from april.engines.ray.node_calls import NodeCalls

    return NodeCalls(functools.partial(_on_this_machine, scorer, settings))


def _on_this_machine(scorer: Scorer, settings: RolloutSettings) -> RewardWorkers:
    limited = settings.reward_memory_gb is not None and STATM.exists()
    memory = int(settings.reward_memory_gb * 1e9) if limited else None  # type: ignore[operator]
    return RewardWorkers(scorer, settings.reward_workers, settings.reward_timeout, memory, settings.reward_env)
