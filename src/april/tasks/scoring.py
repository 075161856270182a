"""How responses are scored: by a dataset's own scorer, by math-verify, or by the user's reward function.

Invariants:
- a scorer sees a problem and response texts, nothing else;
- a scorer pickles as the settings it was made from, so that a worker process builds its own, once;
- every reward that leaves a scorer is a finite float, one per response;
- async functions of a process share one event loop for its life: what they keep between calls (a client, a lock) stays
  good, and they hold no thread while they wait.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from april.loading import load_object
from april.rollout.event_loop import EventLoop
from april.rollout.rewards import RewardError, check_rewards
from april.rollout.trajectory import Reward
from april.rollout.user_code import UserCode
from april.tasks.task import OWN, Problem, TaskSpec


class ScoreFunction(Protocol):
    """Scores all responses to a problem: a number or a `Reward` each; each of them, or all, may have to be awaited."""

    def __call__(self, problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None) -> Any: ...


class WeightedReward(NamedTuple):
    """One of the rewards that are added up."""

    path: str
    name: str
    weight: float
    score: ScoreFunction

    def checked(self, problem: Problem, found: Any, count: int) -> list[Reward]:
        try:
            return check_rewards(found, count)
        except ValueError as error:
            raise RewardError(f"problem {problem.id!r}, reward {self.path!r}: {error}") from None


class SpecScorer:
    """The scorer that `spec` describes: `scorer(problem, responses, lengths) -> rewards`, in their order.

    Of several rewards, the sum is weighted; its `info` names each, unweighted, and what each said beside its number.

    Args:
        spec: its settings `reward` or `rewards`, `reward_scope`, `correct_at`, `extract` and `answer_tag`, and for a
            dataset's own scorer `name` and `params`.

    Attributes:
        scope: "group" if a reward function must see all responses to a problem at once.
        correct_at: see `TaskSpec`.

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
        self.scope: Literal["sample", "group"] = "sample"
        self._parts = [self._part(path, weight) for path, weight in spec.weights.items()]
        names = [part.name for part in self._parts]
        if len(set(names)) < len(names):
            self._parts = [part._replace(name=part.path) for part in self._parts]

    def _part(self, path: str, weight: float) -> WeightedReward:
        if path in OWN:
            return WeightedReward(path, path, weight, _single(_own_scorer(self.spec, path)))
        function = NamedFunction(path, self.spec.reward_scope)
        if function.scope == "group":
            self.scope = "group"
        return WeightedReward(
            path, function.name, weight, function.of_group if function.scope == "group" else _single(function)
        )

    def __reduce__(self) -> tuple[type[SpecScorer], tuple[TaskSpec]]:
        return SpecScorer, (self.spec,)

    def __call__(
        self, problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None = None
    ) -> list[Reward]:
        """One finite reward per response.

        Raises:
            RewardError: what came back is not that; the message names the problem.
        """
        found = self.begin(problem, responses, lengths)
        return found if isinstance(found, list) else reward_loop().run(found)

    def begin(
        self, problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None = None
    ) -> list[Reward] | Coroutine[Any, Any, list[Reward]]:
        """The same; where a function is async, what is left to await, in `reward_loop`."""
        found = [part.score(problem, responses, lengths) for part in self._parts]
        if any(map(_waits, found)):
            return self._awaited(problem, found, len(responses))
        return self._rewards(problem, found, len(responses))

    async def _awaited(self, problem: Problem, found: Sequence[Any], count: int) -> list[Reward]:
        return self._rewards(problem, await asyncio.gather(*map(_settled, found)), count)

    def _rewards(self, problem: Problem, found: Sequence[Any], count: int) -> list[Reward]:
        columns = [part.checked(problem, own, count) for part, own in zip(self._parts, found, strict=True)]
        if not self.spec.rewards:
            return columns[0]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def _sum(self, rewards: Sequence[Reward]) -> Reward:
        value, info = 0.0, dict[str, Any]()
        for part, reward in zip(self._parts, rewards, strict=True):
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
    def of_each(problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None) -> list[Any]:
        known: Sequence[int | None] = [None] * len(responses) if lengths is None else lengths
        return [score(problem, response, length) for response, length in zip(responses, known, strict=True)]

    return of_each


def _own_scorer(spec: TaskSpec, reward: str) -> Callable[[Problem, str, Any], float]:
    score: Callable[[Problem, str], float]
    if reward == "task" and spec.kind == "records":
        reward = "math-verify"
    if reward == "task":
        from april.tasks.reasoning_gym import DatasetScorer

        score = DatasetScorer(spec)
    else:
        from april.tasks.math import math_verify

        score = math_verify
    if (spec.extract or ("tag" if reward == "task" else "whole")) == "whole":
        return lambda problem, response, _: score(problem, response)
    from reasoning_gym.utils import extract_answer

    def score_tagged(problem: Problem, response: str, _: Any) -> float:
        answer = extract_answer(response, spec.answer_tag)
        return 0.0 if answer is None else score(problem, answer)

    return score_tagged


class NamedFunction:
    """The user's own function, called `fn(response, answer, **metadata)`, or with group scope
    `fn(responses, answer, **metadata)`; it may be async.

    Its first two positional parameters get response and answer, whatever they are called. Of the problem's metadata,
    its `prompt` and its `id`, and the response's `length` in tokens (with group scope `lengths`), it gets what its
    signature names, or everything if it takes `**kwargs`. It returns a number, or a `Reward` with more to say.

    Args:
        path: see `load_function`.
        scope: "group" if the function takes a list of responses; an attribute `reward_scope = "group"` of the function
            says the same.
    """

    def __init__(self, path: str, scope: Literal["sample", "group"] = "sample") -> None:
        self.path = path
        self.name = path.rpartition(":" if ":" in path else ".")[2]
        self.function = load_function(path)
        self.scope: Literal["sample", "group"] = (
            "group" if getattr(self.function, "reward_scope", scope) == "group" else scope
        )
        self._file = getattr(sys.modules.get(getattr(self.function, "__module__", "")), "__file__", None)
        try:
            self.signature: inspect.Signature | None = inspect.signature(self.function)
        except ValueError:  # functions written in C may have none
            self.signature = None

    def __call__(self, problem: Problem, response: str, length: int | None = None) -> Any:
        return self._call(problem, response, {} if length is None else {"length": length})

    def of_group(self, problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None = None) -> Any:
        return self._call(problem, list(responses), {} if lengths is None else {"lengths": list(lengths)})

    def _call(self, problem: Problem, response: Any, known: dict[str, Any]) -> Any:
        args, kwargs = self._arguments(problem, response, known)
        with UserCode(), self._located():
            value = self.function(*args, **kwargs)
        return self._wait(value) if inspect.isawaitable(value) else value

    async def _wait(self, value: Awaitable[Any]) -> Any:
        with UserCode(), self._located():
            return await value

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Whatever is raised inside gets a note that says where in the function's own file."""
        try:
            yield
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            if own := [frame for frame in frames if frame.filename == self._file]:
                error.add_note(f"{Path(own[-1].filename).name}, line {own[-1].lineno}")
            raise

    def _arguments(
        self, problem: Problem, response: Any, known: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        both = (response, problem.answer)
        if self.signature is None:
            return both, {}
        parameters = self.signature.parameters.values()
        kinds = [p.kind for p in parameters]
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        args = both if len(positional) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds else both[:1]
        offered = {"id": problem.id, "prompt": problem.prompt, **known, **problem.metadata, "answer": problem.answer}
        taken = positional[: len(args)] + (["answer"] if len(args) == 2 else [])
        everything = inspect.Parameter.VAR_KEYWORD in kinds
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        kwargs = {k: v for k, v in offered.items() if k not in taken and (everything or k in named)}
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise RewardError(
                f"problem {problem.id!r}: the reward function {self.path} cannot be called: {error}; it is given "
                f"(response, answer) and what it names of {', '.join(offered)}"
            ) from None
        return args, kwargs


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at `FILE.py:NAME`, `package.module:NAME` or `package.module.NAME`.

    Raises:
        ValueError: see `load_object`; or the object cannot be called.
    """
    place, dot, name = path.rpartition(".")
    if ":" not in path and not dot:
        raise ValueError(
            f'reward = {path!r}: must be "task", "math-verify" or a function, "FILE.py:NAME" or "package.module:NAME"'
        )
    target = load_object("reward", path if ":" in path else f"{place}:{name}")
    if not callable(target):
        raise ValueError(f"reward = {path!r}: this is a {type(target).__name__}, which cannot be called")
    function: Callable[..., Any] = target
    return function
