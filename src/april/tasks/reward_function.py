"""The user's own reward functions: finding them, and giving them the arguments that they name.

The names of a function's parameters select one of three conventions:

- april's: `fn(response, answer, **columns)`; the first two positional parameters may have any name that is no column's;
- verl's: `compute_score(data_source, solution_str, ground_truth, extra_info)`, all by name;
- TRL's: `fn(prompts, completions, completion_ids, **columns)`, all by name and as lists.

Invariant: whether a function can be called with a problem's columns is known before training (`check`).
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from april.loading import load_object
from april.rollout.rewards import RewardError
from april.rollout.trajectory.reward import Reward
from april.rollout.user_code.user_code import UserCode
from april.tasks.answers import text_of
from april.tasks.task import Problem

VERL, TRL = "solution_str", "completions"
"""Parameters by which the conventions of verl and TRL are recognised."""
USUAL = ({"response", "responses"}, {"answer"})
"""Names of the first two parameters that a column may have too."""


class NamedFunction:
    """A user's reward function; it may be async.

    By april's convention it is called `fn(response, answer, **columns)`, or with group scope
    `fn(responses, answer, **columns)`. Of the problem's columns, its `prompt` and its `id`, and the response's `length`
    in tokens (with group scope `lengths`), it gets those that its signature names, or all if it takes `**kwargs`. It
    returns a number, or a `Reward`; with group scope a sequence of these.

    By verl's convention it returns a number, or a dict with its number as `score`. By TRL's it gets lists, of one
    response or with group scope of all responses to a prompt, and returns a list, in which None counts as 0.

    Args:
        path: see `load_function`.
        scope: "group" if the function takes a list of responses; an attribute `reward_scope = "group"` of the function
            has the same effect.
        answer_column: the answer's column in the data, which names the parameter of TRL's functions.
    """

    def __init__(
        self, path: str, scope: Literal["sample", "group"] = "sample", answer_column: str | None = None
    ) -> None:
        self.path = path
        self.name = path.rpartition(":" if ":" in path else ".")[2]
        self.function = load_function(path)
        self.scope: Literal["sample", "group"] = (
            "group" if getattr(self.function, "reward_scope", scope) == "group" else scope
        )
        self._answer = answer_column or "answer"
        self._file = getattr(sys.modules.get(getattr(self.function, "__module__", "")), "__file__", None)
        try:
            self.signature: inspect.Signature | None = inspect.signature(self.function)
        except ValueError:  # functions written in C may have none
            self.signature = None
        parameters = () if self.signature is None else tuple(self.signature.parameters.values())
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._given = 2 if len(self._positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters) else 1
        """Positional arguments, by april's convention."""
        self.convention = "trl" if TRL in self._named else "verl" if VERL in self._named else "april"
        if self.convention == "verl" and self.scope == "group":
            raise ValueError(
                f"reward = {path!r}: verl's functions score one response at a time; remove reward_scope = 'group'"
            )

    @property
    def reads_token_ids(self) -> bool:
        """Whether the function is given the responses' token ids."""
        return self.convention == "trl" and (self._takes_all or "completion_ids" in self._named)

    def __call__(
        self, problem: Problem, response: str, length: int | None = None, token_ids: Sequence[int] | None = None
    ) -> Any:
        """Score one response."""
        if self.convention == "trl":
            return self._call(self._arguments(self._of_trl(problem, [response], [token_ids])), _only)
        if self.convention == "verl":
            return self._call(self._arguments(self._of_verl(problem, response)), _of_verl_score)
        known = {} if length is None else {"length": length}
        return self._call(self._arguments(self._of_april(problem, known), response))

    def of_group(
        self,
        problem: Problem,
        responses: Sequence[str],
        lengths: Sequence[int] | None = None,
        token_ids: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """Score all responses to a problem."""
        if self.convention == "trl":
            ids: Sequence[Any] = [None] * len(responses) if token_ids is None else token_ids
            return self._call(self._arguments(self._of_trl(problem, responses, ids)), _without_none)
        known = {} if lengths is None else {"lengths": list(lengths)}
        return self._call(self._arguments(self._of_april(problem, known), list(responses)))

    def check(self, problem: Problem) -> None:
        """Check that the function can be called with the columns of `problem`.

        Raises:
            ValueError: a required argument is not offered, or a positional parameter with the name of a column would
                get the response or the answer.
        """
        if self.signature is None:
            return
        if self.convention == "april":
            known = {"lengths": [0]} if self.scope == "group" else {"length": 0}
            offered = self._of_april(problem, known)
            self._check_positional(offered)
            args, kwargs = self._arguments(offered, "")
        else:
            offered = self._of_trl(problem, [""], [[]]) if self.convention == "trl" else self._of_verl(problem, "")
            args, kwargs = self._arguments(offered)
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            needed = [
                p.name for p in self.signature.parameters.values() if p.default is p.empty and p.name in self._named
            ]
            missing = [name for name in needed if name not in kwargs and name not in self._positional[: len(args)]]
            near = difflib.get_close_matches(missing[0], offered, n=1) if missing else []
            raise ValueError(
                f"reward = {self.path!r}: it cannot be called: {error}; problem {problem.id!r} offers "
                f"{', '.join(sorted(offered))}" + (f"; did you mean {near[0]!r}?" if near else "")
            ) from None

    def _check_positional(self, offered: Mapping[str, Any]) -> None:
        usual = (*USUAL, set()) if self._given == 2 else USUAL[:1]
        for parameter, gets, names in zip(self._positional, ("response", "answer"), usual, strict=False):
            other = USUAL[0] if gets == "answer" else USUAL[1]
            known = parameter in offered or parameter in other
            if known and parameter in self._named and parameter not in {*names, self._own(gets)}:
                raise ValueError(
                    f"reward = {self.path!r}: its parameter {parameter!r} would get the {gets}, but is the name of "
                    f"another argument: write fn(response, answer, …), the rest after these two"
                )

    def _own(self, gets: str) -> str:
        return self._answer if gets == "answer" else gets

    def _arguments(self, offered: Mapping[str, Any], *response: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments (response and answer, by april's convention), and offers that the signature names."""
        args = (*response, offered["answer"])[: self._given] if response else ()
        if self.signature is None:
            return (*response, offered["answer"]), {}
        # Python refuses a parameter that is passed by position and by name, and **kwargs need no second answer.
        taken = {*self._positional[: len(args)], *(("answer", self._answer) if len(args) == 2 else ())}
        return args, {k: v for k, v in offered.items() if k not in taken and (self._takes_all or k in self._named)}

    def _of_april(self, problem: Problem, known: Mapping[str, Any]) -> dict[str, Any]:
        answer = text_of(problem.answer)
        own = {"answer": answer, self._answer: answer}
        # Later entries win: columns may replace id, prompt and length, but never the answer.
        return {"id": problem.id, "prompt": problem.prompt, **known, **problem.metadata, **own}

    def _of_verl(self, problem: Problem, response: str) -> dict[str, Any]:
        own = {"solution_str": response, "ground_truth": problem.answer}
        # verl's functions may require extra_info, which records need not have.
        return {"extra_info": None, "prompt": problem.prompt, **problem.metadata, **own}

    def _of_trl(self, problem: Problem, responses: Sequence[str], ids: Sequence[Any]) -> dict[str, Any]:
        count, chat = len(responses), not isinstance(problem.prompt, str)
        columns = {**problem.metadata, self._answer: problem.answer}
        return {
            **{name: [value] * count for name, value in columns.items()},
            "prompts": [problem.prompt] * count,
            "completions": [[{"role": "assistant", "content": text}] if chat else text for text in responses],
            "completion_ids": list(ids),
        }

    def _call(self, arguments: tuple[Any, dict[str, Any]], read: Callable[[Any], Any] = lambda value: value) -> Any:
        args, kwargs = arguments
        with UserCode(), self._located():
            value = self.function(*args, **kwargs)
        return self._wait(value, read) if inspect.isawaitable(value) else read(value)

    async def _wait(self, value: Awaitable[Any], read: Callable[[Any], Any]) -> Any:
        with UserCode(), self._located():
            found = await value
        return read(found)

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Add the line of the function's own file to exceptions raised inside."""
        try:
            yield
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            if own := [frame for frame in frames if frame.filename == self._file]:
                error.add_note(f"{Path(own[-1].filename).name}, line {own[-1].lineno}")
            raise


def _of_verl_score(value: Any) -> Any:
    """verl's functions return a number, or a dict with the number as `score`."""
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise RewardError(f"the reward function returned {value!r}, which has no 'score'")
    return Reward(value["score"], {name: item for name, item in value.items() if name != "score"})


def _without_none(values: Any) -> Any:
    """TRL's functions return None for samples that they do not judge, which add nothing."""
    return [0.0 if value is None else value for value in values] if isinstance(values, list | tuple) else values


def _only(values: Any) -> Any:
    found = _without_none(values)
    if not hasattr(found, "__len__") or isinstance(found, str | Mapping) or len(found) != 1:
        raise RewardError(f"the reward function returned {found!r} where a list of 1 reward was expected")
    return found[0]


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
