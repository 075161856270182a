"""How responses are scored: by a dataset's own scorer, by math-verify, or by the user's reward function.

Invariants:
- a scorer sees a problem and response texts, nothing else;
- a scorer pickles as the settings it was made from, so that a worker process builds its own, once;
- every reward that leaves a scorer is a finite float, one per response;
- async functions of a process share one event loop for its life: objects that they keep between calls (a client, a
  lock) stay valid, and they hold no thread while they wait.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from april.rollout.event_loop import EventLoop
from april.rollout.rewards import RewardError, check_rewards
from april.rollout.trajectory.reward import Reward
from april.tasks.reward_function import NamedFunction
from april.tasks.task import OWN, Problem, TaskSpec

TokenIds: TypeAlias = Sequence[Sequence[int]] | None
ScorerKind = Literal["own", "function"]
"""Scorers of april's own, or functions of the user's."""


class ScoreFunction(Protocol):
    """Scores all responses to a problem: a number or a `Reward` each; each of them, or all, may have to be awaited."""

    def __call__(
        self, problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None, token_ids: TokenIds
    ) -> Any: ...


class WeightedReward(NamedTuple):
    """One of the rewards that are added up."""

    path: str
    name: str
    weight: float
    score: ScoreFunction
    function: NamedFunction | None = None
    """The user's function; None for april's own scorers."""

    def checked(self, problem: Problem, found: Any, count: int) -> list[Reward]:
        try:
            return check_rewards(found, count)
        except ValueError as error:
            raise RewardError(f"problem {problem.id!r}, reward {self.path!r}: {error}") from None


class SpecScorer:
    """The scorer that `spec` describes: `scorer(problem, responses, lengths) -> rewards`, in their order.

    Of several rewards, the sum is weighted; its `info` names each, unweighted, and contains the `info` of each.

    Args:
        spec: its settings `reward` or `rewards`, `reward_scope`, `correct_at`, `extract` and `answer_tag`, and for a
            dataset's own scorer `name` and `params`.

    Attributes:
        scope: "group" if a reward function must see all responses to a problem at once.
        correct_at: see `TaskSpec`.
        reads_token_ids: whether a reward function is given the responses' token ids.

    Raises:
        ValueError: a reward function cannot be found, or a setting does not go with it.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.correct_at = spec.correct_at
        own = OWN.intersection(spec.weights)
        if own == set(spec.weights) and len(own) == 1 and spec.correct_at is None:
            self.correct_at = 1.0
        if spec.extract is not None and not own:
            raise ValueError(f"extract = {spec.extract!r}: {spec.reward} is given the whole response; leave it out")
        if spec.reward_scope == "group" and own == set(spec.weights):
            raise ValueError(f'reward_scope = "group" needs a reward function of your own, not {spec.reward!r}')
        self._parts = [self._part(path, weight) for path, weight in spec.weights.items()]
        names = [part.name for part in self._parts]
        # Functions of the same name in different files would share one entry of `info`.
        if len(set(names)) < len(names):
            self._parts = [part._replace(name=part.path) for part in self._parts]
        functions = [part.function for part in self._parts if part.function]
        self.scope: Literal["sample", "group"] = "group" if any(f.scope == "group" for f in functions) else "sample"
        self.reads_token_ids = any(function.reads_token_ids for function in functions)

    def _part(self, path: str, weight: float) -> WeightedReward:
        if path in OWN:
            return WeightedReward(path, path, weight, _single(_own_scorer(self.spec, path)))
        function = NamedFunction(path, self.spec.reward_scope, self.spec.answer_column)
        score = function.of_group if function.scope == "group" else _single(function)
        return WeightedReward(path, function.name, weight, score, function)

    def __reduce__(self) -> tuple[type[SpecScorer], tuple[TaskSpec]]:
        return SpecScorer, (self.spec,)

    @property
    def kinds(self) -> tuple[ScorerKind, ...]:
        """Whether scorers of april's own and functions of the user's are among the rewards."""
        return tuple(dict.fromkeys(_kind(part) for part in self._parts))

    def check(self, problems: Iterable[Problem]) -> None:
        """Check reward functions and answers before training; log answers that no response can match.

        Raises:
            ValueError: a reward function cannot be called with the columns of a problem.
        """
        problems = list(problems)
        # One problem for each set of columns suffices. Reversed, so that the first such problem remains.
        examples = {frozenset(problem.metadata): problem for problem in reversed(problems)}
        for function in (part.function for part in self._parts if part.function):
            for problem in examples.values():
                function.check(problem)
        if any(_is_math(self.spec, part.path) for part in self._parts):
            from april.tasks.math import warn_of_unreadable

            warn_of_unreadable(problem.answer for problem in problems)

    def __call__(
        self,
        problem: Problem,
        responses: Sequence[str],
        lengths: Sequence[int] | None = None,
        token_ids: TokenIds = None,
        kind: ScorerKind | None = None,
    ) -> list[Reward]:
        """One finite reward per response.

        Args:
            kind: add up these rewards alone; None for all.

        Raises:
            RewardError: a reward function returned something else; the message names the problem.
        """
        found = self.begin(problem, responses, lengths, token_ids, kind)
        return found if isinstance(found, list) else reward_loop().run(found)

    def begin(
        self,
        problem: Problem,
        responses: Sequence[str],
        lengths: Sequence[int] | None = None,
        token_ids: TokenIds = None,
        kind: ScorerKind | None = None,
    ) -> list[Reward] | Coroutine[Any, Any, list[Reward]]:
        """Return the same, or a coroutine for `reward_loop` if a function is async."""
        parts = [part for part in self._parts if kind in (None, _kind(part))]
        found = [part.score(problem, responses, lengths, token_ids) for part in parts]
        if any(map(_waits, found)):
            return self._awaited(problem, parts, found, len(responses))
        return self._rewards(problem, parts, found, len(responses))

    def zero(self) -> Reward:
        """The reward of a response by april's own scorers, when these cannot judge it."""
        parts = [part for part in self._parts if part.function is None]
        return self._sum(parts, [Reward(0.0)] * len(parts)) if self.spec.rewards else Reward(0.0)

    @staticmethod
    def added(own: Reward, function: Reward) -> Reward:
        """Return the sum of the rewards of both kinds."""
        return Reward(own.value + function.value, {**own.info, **function.info})

    async def _awaited(
        self, problem: Problem, parts: Sequence[WeightedReward], found: Sequence[Any], count: int
    ) -> list[Reward]:
        return self._rewards(problem, parts, await asyncio.gather(*map(_settled, found)), count)

    def _rewards(
        self, problem: Problem, parts: Sequence[WeightedReward], found: Sequence[Any], count: int
    ) -> list[Reward]:
        columns = [part.checked(problem, own, count) for part, own in zip(parts, found, strict=True)]
        if not self.spec.rewards:
            return columns[0]
        return [self._sum(parts, row) for row in zip(*columns, strict=True)]

    def _sum(self, parts: Sequence[WeightedReward], rewards: Sequence[Reward]) -> Reward:
        value, info = 0.0, dict[str, Any]()
        for part, reward in zip(parts, rewards, strict=True):
            value += part.weight * reward.value
            info |= {part.name: reward.value} | {f"{part.name}/{name}": said for name, said in reward.info.items()}
        return Reward(value, info)


@functools.cache
def reward_loop() -> EventLoop:
    """The event loop of this process's async reward functions."""
    return EventLoop("async reward functions")


def _waits(found: Any) -> bool:
    return inspect.isawaitable(found) or (isinstance(found, list) and any(map(inspect.isawaitable, found)))


async def _settled(found: Any) -> Any:
    if inspect.isawaitable(found):
        return await found
    return await asyncio.gather(*map(_settled, found)) if _waits(found) else found


def _single(score: Callable[..., Any]) -> ScoreFunction:
    def of_each(
        problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None, token_ids: TokenIds
    ) -> list[Any]:
        nothing = [None] * len(responses)
        known = zip(responses, lengths or nothing, token_ids or nothing, strict=True)
        return [score(problem, *response) for response in known]

    return of_each


def _kind(part: WeightedReward) -> ScorerKind:
    return "own" if part.function is None else "function"


def _is_math(spec: TaskSpec, reward: str) -> bool:
    return reward == "math-verify" or (reward == "task" and spec.kind == "records")


def _own_scorer(spec: TaskSpec, reward: str) -> Callable[..., float]:
    score: Callable[[Problem, str], float]
    if not _is_math(spec, reward):
        from april.tasks.reasoning_gym import DatasetScorer

        score = DatasetScorer(spec)
    else:
        from april.tasks.math import math_verify

        score = math_verify
    if (spec.extract or ("whole" if _is_math(spec, reward) else "tag")) == "whole":
        return lambda problem, response, *_: score(problem, response)
    from reasoning_gym.utils import extract_answer

    def score_tagged(problem: Problem, response: str, *_: Any) -> float:
        answer = extract_answer(response, spec.answer_tag)
        return 0.0 if answer is None else score(problem, answer)

    return score_tagged
