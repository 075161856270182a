"""Python functions as tools: an environment that answers the policy's tool calls.

Invariants:
- an error in a call becomes an observation that names it: no JSON, no such tool, wrong arguments, a tool that fails;
- calls are answered one after the other, in their order, each with a message of its own;
- a turn without a call ends the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, SupportsFloat

from april.rendering.tool_calls import ERRORS, Call
from april.rollout.episodes.environment import EnvironmentLost, EnvStep, Message, Observation, ObservationError, Turn
from april.rollout.user_code.user_code import UserCode, in_one_line

Tool = Callable[..., Any]
Schema = Mapping[str, Any]

NOT_TOOLS = ("reset", "get_reward", "close", "state", "restore")
"""Public methods of a class with tools that are none."""


class ToolError(ValueError):
    """A function that cannot be offered as a tool."""


def schema_of(tool: Tool) -> Schema:
    """The JSON schema that chat templates show: from signature, type hints and docstring, in Google's style.

    Raises:
        ToolError: a hint or a description is missing; the message names the function.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: Schema = get_json_schema(tool)
        return schema
    except Exception as error:  # several kinds, which transformers does not export
        where = inspect.getsourcefile(tool) if inspect.isroutine(tool) else None
        raise ToolError(
            f"{getattr(tool, '__name__', tool)} cannot be a tool: {error} A tool needs type hints, and a docstring "
            f"that describes each argument under Args:{f' ({where})' if where else ''}"
        ) from None


class Toolbox:
    """Tools by the names they are called by.

    Raises:
        ToolError: a function cannot be offered as a tool.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.tools = dict(tools)
        self.schemas = {name: schema_of(tool) for name, tool in self.tools.items()}
        self.has_async = any(map(inspect.iscoroutinefunction, self.tools.values()))

    def calls(self, turn: Turn) -> list[BoundCall]:
        """The calls of a turn, in their order; those that could not be read come last."""
        message = turn.message or {}
        read = [self._bound(call["function"]) for call in message.get("tool_calls", ())]
        return [*read, *(BoundCall("", None, {}, f"Error: {error}") for error in message.get(ERRORS, ()))]

    def _bound(self, call: Call) -> BoundCall:
        name = call["name"]
        if name not in self.tools:
            return BoundCall(name, None, {}, f"Error: there is no tool {name!r}; there are {', '.join(self.tools)}")
        arguments = _typed(call["arguments"], self.schemas[name])
        try:
            # Bound before the call: a TypeError in the call itself is then a failure of the tool.
            inspect.signature(self.tools[name]).bind(**arguments)
        except TypeError as error:
            return BoundCall(name, None, {}, f"Error: {name}: {error}")
        return BoundCall(name, self.tools[name], arguments)


class BoundCall(NamedTuple):
    """A call with the function it names, or with the reason why there is none."""

    name: str
    function: Tool | None
    arguments: Mapping[str, Any]
    error: str = ""

    def answer(self) -> Message:
        """Return the tool's result, or a message that it failed."""
        if self.function is None:
            return self._message(self.error)
        try:
            with UserCode():
                return self._message(_as_text(self.function(**self.arguments)))
        except EnvironmentLost:
            # Not an answer to the policy: april replaces the environment.
            raise
        except Exception as error:
            return self._failure(error)

    async def answer_async(self) -> Message:
        """The same where tools may be async; a plain one works in a thread."""
        if not inspect.iscoroutinefunction(self.function):
            return await asyncio.to_thread(self.answer)
        try:
            with UserCode():
                return self._message(_as_text(await self.function(**self.arguments)))
        except EnvironmentLost:
            raise
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> Message:
        return self._message(f"Error: {self.name} failed: {in_one_line(error)}")

    def _message(self, said: str) -> Message:
        return {"role": "tool", "name": self.name, "content": said}


class ToolEnvironment:
    """Answers the tool calls of a policy. A turn without a call is the policy's answer, and the end.

    The rewards are the task's: its reward function sees the whole response.

    Args:
        tools: plain or async functions, by the names they are called by.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.toolbox = Toolbox(tools)
        if self._is_async:  # otherwise it works in a thread, and may block
            self.step = self._step_async  # type: ignore[method-assign, assignment]

    @property
    def _is_async(self) -> bool:
        return self.toolbox.has_async

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        """Return nothing: the prompt contains everything."""
        return ""

    def step(self, turn: Turn) -> EnvStep:
        """The tools' answers."""
        return _step([call.answer() for call in self.toolbox.calls(turn)])

    async def _step_async(self, turn: Turn) -> EnvStep:
        return _step([await call.answer_async() for call in self.toolbox.calls(turn)])

    def close(self) -> None:
        """Nothing is held."""


class ToolClassEnvironment(ToolEnvironment):
    """An object with tools: `reset(**row)`, public methods that are tools, and `get_reward()`, as TRL's
    `environment_factory` makes them.

    `reset` gets the record's columns, `prompt`, `answer`, `id` and `seed` if its signature names them, or all of them
    if it takes `**kwargs`; its result, if any, becomes a message after the prompt. `get_reward` is called after each
    turn; a turn's reward is the difference to the previous result, so that an episode's rewards add up to the last
    result.

    Args:
        thing: the object.

    Raises:
        ToolError: it has no `reset`, or no method that can be a tool.
    """

    def __init__(self, thing: Any) -> None:
        self.object = thing
        self._get_reward: Callable[[], Any] | None = getattr(self.object, "get_reward", None)
        self._reward = 0.0
        # Last, because it reads `_is_async`, which needs `_get_reward`.
        super().__init__(tools_of(thing))

    @property
    def _is_async(self) -> bool:
        return super()._is_async or inspect.iscoroutinefunction(self._get_reward)

    def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        """Begin again, with the problem's record."""
        self._reward = 0.0
        offered = {**prompt, "seed": seed}
        parameters = inspect.signature(self.object.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            offered = {name: value for name, value in offered.items() if name in parameters}
        said: Observation | None = self.object.reset(**offered)
        return "" if said is None else said

    def step(self, turn: Turn) -> EnvStep:
        """The tools' answers, and by how much the reward has changed."""
        return self._rewarded(super().step(turn), self._get_reward() if self._get_reward else 0.0)

    async def _step_async(self, turn: Turn) -> EnvStep:
        answered = await super()._step_async(turn)
        reward = self._get_reward() if self._get_reward else 0.0
        return self._rewarded(answered, await reward if inspect.isawaitable(reward) else reward)

    def close(self) -> None:
        """Closes the object, if it can be closed."""
        if hasattr(self.object, "close"):
            self.object.close()

    def _rewarded(self, answered: EnvStep, reward: Any) -> EnvStep:
        if isinstance(reward, str) or not isinstance(reward, SupportsFloat):
            raise ObservationError(f"get_reward returned {reward!r}, which is no number")
        before, self._reward = self._reward, float(reward)
        return replace(answered, reward=self._reward - before)


def tools_of(thing: Any) -> dict[str, Tool]:
    """The public methods of an object that are tools.

    Raises:
        ToolError: there is no `reset`, or no tool.
    """
    kind = type(thing)
    if not callable(getattr(kind, "reset", None)):
        raise ToolError(f"{kind.__name__} has neither step nor reset: it is no environment")
    # Of the class: on the object, getmembers would evaluate properties.
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    tools = {name: getattr(thing, name) for name in methods if not name.startswith("_") and name not in NOT_TOOLS}
    if not tools:
        raise ToolError(f"{kind.__name__} has no step, and no public method that could be a tool")
    return tools


def _step(answers: Sequence[Message]) -> EnvStep:
    return EnvStep(answers, done=not answers)


def _typed(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Arguments that came as text, as some formats write them all, in the types of the schema."""
    properties = schema["function"]["parameters"].get("properties", {})
    return {name: _value(value, properties.get(name, {}).get("type")) for name, value in arguments.items()}


def _value(value: Any, kind: Any) -> Any:
    if not isinstance(value, str) or kind is None or "string" in kind:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _as_text(said: Any) -> str:
    if isinstance(said, str):
        return said
    try:
        return json.dumps(said, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(said)
