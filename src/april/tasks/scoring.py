"""How responses are scored: by a dataset's own scorer, by math-verify, or by the user's reward function.

Invariants:
- a scorer sees a problem and response texts, nothing else;
- a scorer pickles as the settings it was made from, so that a worker process builds its own, once;
- every reward that leaves a scorer is a finite float, one per response.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from april.rollout.rewards import RewardError, check_rewards
from april.tasks.task import Problem, TaskSpec

ScoreFunction = Callable[[Problem, Sequence[str]], Any]


class SpecScorer:
    """The scorer that `spec` describes: `scorer(problem, responses) -> rewards`, in their order.

    Args:
        spec: its settings `reward`, `reward_scope`, `extract` and `answer_tag`, and for a dataset's own scorer `name`
            and `params`.

    Attributes:
        scope: "group" if the reward function must see all responses to a problem at once.
        correct_at: see `TaskSpec`.

    Raises:
        ValueError: the reward function cannot be found, or a setting does not go with it.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        reward = "math-verify" if spec.reward == "task" and spec.kind == "records" else spec.reward
        self.scope: Literal["sample", "group"] = "sample"
        self.correct_at = spec.correct_at
        self._score: ScoreFunction
        if reward in ("task", "math-verify"):
            if spec.reward_scope == "group":
                raise ValueError(f'reward_scope = "group" needs a reward function of your own, not {spec.reward!r}')
            self._score = _single(_own_scorer(spec, reward))
            self.correct_at = 1.0 if spec.correct_at is None else spec.correct_at
        else:
            if spec.extract is not None:
                raise ValueError(f"extract = {spec.extract!r}: {reward} is given the whole response; leave it out")
            function = RewardFunction(reward, spec.reward_scope)
            self.scope = function.scope
            self._score = function if function.scope == "group" else _single(function)

    def __reduce__(self) -> tuple[type[SpecScorer], tuple[TaskSpec]]:
        return SpecScorer, (self.spec,)

    def __call__(self, problem: Problem, responses: Sequence[str]) -> list[float]:
        """One finite reward per response.

        Raises:
            RewardError: what came back is not that; the message names the problem.
        """
        rewards = self._score(problem, responses)
        try:
            return check_rewards(rewards, len(responses))
        except ValueError as error:
            raise RewardError(f"problem {problem.id!r}, reward {self.spec.reward!r}: {error}") from None


def _single(score: Callable[[Problem, str], float]) -> ScoreFunction:
    return lambda problem, responses: [score(problem, response) for response in responses]


def _own_scorer(spec: TaskSpec, reward: str) -> Callable[[Problem, str], float]:
    score: Callable[[Problem, str], float]
    if reward == "task":
        from april.tasks.reasoning_gym import DatasetScorer

        score = DatasetScorer(spec)
    else:
        from april.tasks.math import math_verify

        score = math_verify
    if (spec.extract or ("tag" if reward == "task" else "whole")) == "whole":
        return score
    from reasoning_gym.utils import extract_answer

    def score_tagged(problem: Problem, response: str) -> float:
        answer = extract_answer(response, spec.answer_tag)
        return 0.0 if answer is None else score(problem, answer)

    return score_tagged


class RewardFunction:
    """The user's own function, called `fn(response, answer, **metadata)`, or with group scope
    `fn(responses, answer, **metadata)`; it may be async.

    Its first two positional parameters get response and answer, whatever they are called. Of the problem's metadata,
    its `prompt` and its `id` it gets what its signature names, or everything if it takes `**kwargs`.

    Args:
        path: `package.module:function`, or `package.module.function`. The current directory is searched first.
        scope: "group" if the function takes a list of responses; an attribute `reward_scope = "group"` of the function
            says the same.
    """

    def __init__(self, path: str, scope: Literal["sample", "group"] = "sample") -> None:
        self.path = path
        self.function = load_function(path)
        self.scope: Literal["sample", "group"] = (
            "group" if getattr(self.function, "reward_scope", scope) == "group" else scope
        )
        try:
            self.signature: inspect.Signature | None = inspect.signature(self.function)
        except ValueError:  # functions written in C may have none
            self.signature = None

    def __call__(self, problem: Problem, responses: str | Sequence[str]) -> Any:
        response = responses if isinstance(responses, str) else list(responses)
        args, kwargs = self._arguments(problem, response)
        value = self.function(*args, **kwargs)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        return value

    def _arguments(self, problem: Problem, response: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        both = (response, problem.answer)
        if self.signature is None:
            return both, {}
        parameters = self.signature.parameters.values()
        kinds = [p.kind for p in parameters]
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        args = both if len(positional) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds else both[:1]
        offered = {"id": problem.id, "prompt": problem.prompt, **problem.metadata, "answer": problem.answer}
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


async def _await(value: Any) -> Any:
    return await value


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:function` or `package.module.function`.

    The current directory is put first on `sys.path`, as `python -m` does, so that a file beside the recipe is found.

    Raises:
        ValueError: no such module, no such attribute, or it cannot be called.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise ValueError(
            f'reward = {path!r}: must be "task", "math-verify" or the path of a function, "package.module:function"'
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something it imports is not
        raise ValueError(
            f"reward = {path!r}: there is no module {error.name!r}, neither in the current directory nor installed"
        ) from None
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            raise ValueError(f"reward = {path!r}: {getattr(target, '__file__', target)} has no {attribute!r}")
        target = getattr(target, attribute)
    if not callable(target):
        raise ValueError(f"reward = {path!r}: this is a {type(target).__name__}, which cannot be called")
    function: Callable[..., Any] = target
    return function
