"""Compute rewards while generation continues.

Invariants:
- a reward function never blocks generation or an interrupt: it runs in a task, plain functions in a thread;
- a plain function that never returns exceeds its own time limit, and delays no other call (`Threads`);
- a finished sample is scored exactly once as long as its function answers; a failure never costs the sample itself.

For functions that can hang or take the process down, `april.tasks.isolation` runs them in worker processes.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

from april.rollout.batch import Failure
from april.rollout.json_types import finite_number, json_types, shown
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import (
    HangingError,
    LateError,
    Threads,
    UserCode,
    end_tasks,
    in_one_line,
    time_limit,
)

RewardFunction = Callable[[Prompt, Sample], float | Reward | Awaitable[float | Reward]]
"""Scores one finished sample. An episode of several sequences is scored by the one that it ended with."""
GroupRewardFunction = Callable[
    [Prompt, Sequence[Sample]], Sequence[float | Reward] | Awaitable[Sequence[float | Reward]]
]
"""Scores all samples of a complete group at once, in their order."""

THREADS = 8
"""Plain functions that run at a time, and calls that may hang before no further one is begun."""


class RewardError(Exception):
    """A reward function failed, and the run is set to stop when one does; or none can be computed any more."""

    @classmethod
    def of(cls, failure: Failure) -> RewardError:
        """Return the error that ends a step after a reward function or a filter has failed."""
        which = "dynamic filter" if failure.kind == "filter" else "reward function"
        return cls(
            f"the {which} failed on sample {failure.sample_id} of prompt {failure.prompt_id!r}: "
            f'{failure.error}\nSet on_reward_error to "zero" or "reject" to go on without it.'
        )


class Verdict(NamedTuple):
    """Result of scoring: the samples' rewards, or the error."""

    group: Group
    samples: Sequence[Sample]
    rewards: Sequence[Reward]
    error: str | None = None
    failure: Literal["reward", "reward timeout"] = "reward"
    """Kind of the error."""
    hopeless: bool = False
    """No further reward can be computed."""


class RewardTasks:
    """Reward computations in progress. `take` returns the verdicts that arrived since the last call."""

    def __init__(
        self,
        function: RewardFunction | GroupRewardFunction,
        scope: Literal["sample", "group"] = "sample",
        timeout: float | None = None,
    ) -> None:
        if scope not in ("sample", "group"):
            raise ValueError(f'reward_scope = {scope!r}: must be "sample" or "group"')
        self.function: Callable[..., Any] = function
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self.scope = scope
        self.timeout = timeout
        self._tasks: dict[asyncio.Task[None], Group] = {}
        """Each task with the group that it scores now."""
        self._next: deque[tuple[Group, Sequence[Sample]]] = deque()
        """Groups and samples that no task has begun to score."""
        self._beginning = False
        """Whether a task is about to begin with `_next`."""
        self._scoring: asyncio.Task[None] | None = None
        """The task that was made last, which scores nothing yet."""
        self._verdicts: deque[Verdict] = deque()
        self._threads = Threads(
            THREADS,
            "run the reward function in processes, which can be stopped (reward_workers in a recipe, "
            "april.tasks.isolation.RewardWorkers in a program)",
        )
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks) + len(self._next)

    def finished(self, group: Group, sample: Sample) -> None:
        """A sample has finished, as the last of its group if the scope is "group": score it, or the group."""
        self._start(group, [sample] if self.scope == "sample" else group.outcomes)

    def missing(self, groups: Iterable[Group]) -> None:
        """Score finished samples without a reward, after a restart."""
        begun = [*self._tasks.values(), *(group for group, _ in self._next)]
        scoring = {group.id for group in begun} | {verdict.group.id for verdict in self._verdicts}
        for group in groups:
            if group.id in scoring:
                continue
            if self.scope == "group":
                if group.complete and not group.rewarded:
                    self._start(group, group.outcomes)
            else:
                for sample in group.outcomes:
                    if sample.finish is not None and sample.reward is None:
                        self._start(group, [sample])

    def forget(self, group: Group) -> None:
        """Stop the computations for a rejected group; none of its verdicts arrives any more."""
        self._next = deque(each for each in self._next if each[0] is not group)
        for task in [task for task, scored in self._tasks.items() if scored is group]:
            del self._tasks[task]
            task.cancel()

    def _start(self, group: Group, samples: Sequence[Sample]) -> None:
        self._next.append((group, samples))
        if not self._beginning:
            self._begin()

    def _begin(self) -> None:
        """Start a task that scores samples one after the other. When it has to wait, start another task for the rest:
        functions that answer at once share a task, and no function waits for another."""
        self._beginning = bool(self._next)
        if self._next:
            # The event loop holds tasks by weak references only, and `_tasks` holds this one once it scores.
            self._scoring = asyncio.create_task(self._score_next(), name="rewards")
            # Called after the new task has run: samples that are left in `_next` then wait behind a slow function.
            asyncio.get_running_loop().call_soon(self._begin)

    async def _score_next(self) -> None:
        while self._next:
            await self._score(*self._next.popleft())

    async def _score(self, group: Group, samples: Sequence[Sample]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = group
        try:
            value = await self._call(group.prompt, samples)
            with UserCode():
                rewards = check_rewards(value, len(samples))
            self._verdicts.append(Verdict(group, samples, rewards))
        except LateError:
            reason = f"no reward within {self.timeout:g} s"
            self._verdicts.append(Verdict(group, samples, (), reason, "reward timeout"))
        except TimeoutError as error:
            reason = str(error) or "the reward function raised TimeoutError"
            self._verdicts.append(Verdict(group, samples, (), reason, "reward timeout"))
        except HangingError as error:
            self._verdicts.append(Verdict(group, samples, (), str(error), hopeless=True))
        except Exception as error:
            self._verdicts.append(Verdict(group, samples, (), described(error)))
        finally:
            # Here and not in a callback of the task: a group never has a verdict and a computation in progress at once.
            self._tasks.pop(task, None)
        self._arrived.set()

    async def _call(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float | Reward]:
        argument: Any = samples if self.scope == "group" else samples[0]
        if self._async:
            async with time_limit(self.timeout):
                with UserCode():
                    value = await self.function(prompt, argument)
        else:
            value = await self._threads.call(self.function, (prompt, argument), self.timeout)
        return value if self.scope == "group" else [value]

    def take(self) -> list[Verdict]:
        verdicts = list(self._verdicts)
        self._verdicts.clear()
        self._arrived.clear()
        return verdicts

    async def wait(self) -> None:
        """Wait until a verdict has arrived that was not taken."""
        await self._arrived.wait()

    async def close(self) -> None:
        """Stop every computation in progress, and drop verdicts that were not taken. The samples stay unscored, and are
        scored again by `missing`."""
        self._next.clear()
        await end_tasks(list(self._tasks))
        self._tasks.clear()
        self._verdicts.clear()


def described(error: Exception) -> str:
    """Return an error in one line: its kind, its message, and where it was raised if a note names the place."""
    places = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    text = str(error) if type(error) is RewardError else in_one_line(error)  # a RewardError is reported as one
    return text + "".join(f" ({place})" for place in places[:1])


def check_rewards(rewards: Sequence[float | Reward], expected: int) -> list[Reward]:
    """Return the rewards as finite numbers, one per sample.

    Raises:
        ValueError: the count is wrong, a reward is no finite number, or its info is not JSON types.
    """
    # Text, mappings and sets are iterable, but do not hold rewards in the order of the samples.
    if isinstance(rewards, str | bytes | bytearray | Mapping | Set) or not isinstance(rewards, Iterable):
        raise ValueError(f"the reward function returned {shown(rewards)} where {expected} rewards were expected")
    values = list(rewards)
    if len(values) != expected:
        raise ValueError(f"the reward function returned {len(values)} rewards for {expected} samples")
    return [_check_reward(value) for value in values]


def _check_reward(given: float | Reward) -> Reward:
    if given.__class__ is float and math.isfinite(given):  # the common case
        return Reward(given)
    value, info = (given.value, given.info) if isinstance(given, Reward) else (given, None)
    number = finite_number(value)
    if number is None:
        raise ValueError(f"the reward function returned {shown(value)}, which is no finite number")
    return Reward(number) if info is None else Reward(number, json_types(dict(info), "the reward's info"))
