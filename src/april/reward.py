"""Rewards computed beside generation.

Invariants:
- a reward function never blocks generation or an interrupt: it runs in a task, plain functions in a thread;
- a finished sample is scored exactly once as long as its function answers; a failure never costs the sample itself.

For functions that can hang or take the process down, `april.tasks.isolation` runs them in worker processes.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from april.trajectory import Group, Prompt, Sample

RewardFunction = Callable[[Prompt, Sample], float | Awaitable[float]]
"""Scores one finished sample."""
GroupRewardFunction = Callable[[Prompt, Sequence[Sample]], Sequence[float] | Awaitable[Sequence[float]]]
"""Scores all samples of a complete group at once, in their order."""
RewardErrorPolicy = Literal["raise", "zero", "reject"]
"""What a failing reward function means: the run stops, the sample scores 0, or its group is left out."""


class RewardError(Exception):
    """A reward function failed, and the run is set to stop when one does."""


class Verdict(NamedTuple):
    """What came of scoring: the samples' rewards, or the error."""

    group: Group
    samples: Sequence[Sample]
    rewards: Sequence[float]
    error: str | None = None


class RewardTasks:
    """The reward computations under way. `take` returns the verdicts that arrived since it was last called."""

    def __init__(
        self,
        function: RewardFunction | GroupRewardFunction,
        scope: Literal["sample", "group"] = "sample",
        timeout: float | None = None,
    ) -> None:
        if scope not in ("sample", "group"):
            raise ValueError(f'reward_scope = {scope!r}: must be "sample" or "group"')
        if timeout is not None and timeout <= 0:
            raise ValueError(f"reward_timeout = {timeout}: must be positive seconds, or None for no limit")
        self.function: Callable[..., Any] = function
        self.scope = scope
        self.timeout = timeout
        self._tasks: dict[asyncio.Task[None], Group] = {}
        self._verdicts: deque[Verdict] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    def finished(self, group: Group, sample: Sample) -> None:
        """A sample has finished: score it, or its whole group once the last one has."""
        if self.scope == "sample":
            self._start(group, [sample])
        elif group.complete:
            self._start(group, group.samples)

    def missing(self, group: Group) -> None:
        """Score what has finished and has no reward, after a restart."""
        scoring = {s.id for v in self._verdicts for s in v.samples}
        if group in self._tasks.values() or scoring.intersection(s.id for s in group.samples):
            return
        if self.scope == "group":
            if group.complete and not group.rewarded:
                self._start(group, group.samples)
        else:
            for sample in group.samples:
                if sample.finish is not None and sample.reward is None:
                    self._start(group, [sample])

    def _start(self, group: Group, samples: Sequence[Sample]) -> None:
        task = asyncio.create_task(self._score(group, samples), name=f"reward {samples[0].id}")
        self._tasks[task] = group

    async def _score(self, group: Group, samples: Sequence[Sample]) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                value = await self._call(group.prompt, samples)
            self._verdicts.append(Verdict(group, samples, check_rewards(value, len(samples))))
        except TimeoutError as error:
            reason = str(error) or f"no reward within {self.timeout:g} s"
            self._verdicts.append(Verdict(group, samples, (), reason))
        except Exception as error:
            self._verdicts.append(Verdict(group, samples, (), f"{type(error).__name__}: {error}"))
        finally:
            # Here and not in a callback of the task: a verdict and a computation under way never coexist.
            self._tasks.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        self._arrived.set()

    async def _call(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float]:
        argument: Any = samples if self.scope == "group" else samples[0]
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__):
            value = await self.function(prompt, argument)
        else:
            value = await asyncio.to_thread(self.function, prompt, argument)
            if inspect.isawaitable(value):
                value = await value
        return value if self.scope == "group" else [value]

    def take(self) -> list[Verdict]:
        verdicts = list(self._verdicts)
        self._verdicts.clear()
        self._arrived.clear()
        return verdicts

    async def wait(self) -> None:
        """Until a verdict has arrived that was not taken."""
        await self._arrived.wait()

    async def close(self) -> None:
        """Stop every computation under way. The samples stay unscored and are scored again after a restart."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()


def check_rewards(rewards: Sequence[float], expected: int) -> list[float]:
    """Rewards as finite floats, one per sample.

    Raises:
        ValueError: the count is wrong, or a reward is no finite number.
    """
    if isinstance(rewards, str) or not isinstance(rewards, Iterable):
        raise ValueError(f"the reward function returned {rewards!r} where {expected} rewards were expected")
    values = list(rewards)
    if len(values) != expected:
        raise ValueError(f"the reward function returned {len(values)} rewards for {expected} samples")
    for value in values:
        try:
            finite = not isinstance(value, str) and math.isfinite(value)
        except TypeError:
            finite = False
        if not finite:
            raise ValueError(f"the reward function returned {value!r}, which is no finite number")
    return [float(value) for value in values]
