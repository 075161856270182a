"""TRL's `tools` and `environment_factory` as april's episodes.

Invariants:
- TRL's chat template renders prompts, turns and tool results, and TRL's parser reads turns; sampled tokens are never
  tokenised again;
- tools are called as TRL calls them: synchronous ones before async ones, and a failed call returns `{"error": ...}`;
- a reward function receives the environment of its completion in its final state; an environment that was lost in a
  restart is rebuilt by the same calls;
- `max_completion_length` counts all tokens after the prompt, including those of tools.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from april.environments.bridge import ChatBridge
from april.environments.tools import schema_of
from april.rendering.conversation import TemplateError
from april.rollout.episodes.environment import EnvStep, Message, Observation, Said, Turn, fingerprint
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.params import EpisodeLimits
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

Row = tuple[Mapping[str, Any], Sample]
"""Row of TRL's dataset, and a completion of its prompt."""

NO_PROMPT: Sequence[Message] = ({"role": "user", "content": ""},)
"""TRL's prompt for rows without one, whose environment provides it."""


class TRLEpisodes:
    """Tools and environments of a TRL trainer, which TRL has already checked.

    Args:
        alone: whether this is the only process of the job. Environments are objects of one process.

    Raises:
        ValueError: april does not support a tool, a row or the chat template; the message names TRL's argument.
    """

    def __init__(self, trainer: Any, alone: bool) -> None:
        self._factories: Mapping[str | None, Callable[[], Any]] = trainer.environment_factories or {}
        if self._factories and not alone:
            raise ValueError(
                "environment_factory: environments live in one process, and this job has several; use tools, or one "
                "process"
            )
        self._several: bool = trainer._multi_environment
        self._tools: Sequence[Callable[..., Any]] = trainer._standalone_tools
        self._pools: dict[str | None, list[Any]] = {}
        if self._factories:
            self._pools = {name: list(made) for name, made in trainer._environment_pool.items()}
        self.is_async = any(map(inspect.iscoroutinefunction, trainer.tools))
        self.most_calls: int = trainer.max_tool_calling_iterations
        try:
            offered = trainer._env_tools if self._factories else {None: trainer.tools}
            self._schemas = {name: [schema_of(tool) for tool in tools] for name, tools in offered.items()}
            self.bridge = TRLBridge(trainer, self)
        except TemplateError as error:
            raise ValueError(f"processing_class: turns cannot be concatenated exactly: {error}") from None
        except ValueError as error:
            raise ValueError(f"tools: {error}") from None
        self._tokenizer = trainer.processing_class
        self._template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        self._kept: dict[str, ToolEpisode] = {}
        """Environments of episodes that have ended, by sample id."""
        self.environments: list[Any] = []
        """The user's environments, one for each row of the last call."""
        self._shown: list[ToolEpisode] = []
        self._warned_of_signals = False
        first = next(iter(trainer.train_dataset))
        if not self._factories or self._named(first) in self._factories:  # as TRL, `_name` raises later
            self.encode(first)

    def episodes(self, context_length: int) -> EnvironmentEpisodes:
        """Return the scheduler's episodes: without time limits, as in TRL; lost environments are replayed."""
        limits = EpisodeLimits(
            recovery="replay" if self._factories else "stateless",
            on_error="end",
            reset_timeout=None,
            step_timeout=None,
        )
        self.bridge.context_length = context_length
        return EnvironmentEpisodes(
            lambda: ToolEpisode(self), self.bridge, context_length, limits, _row, self._keep_ended
        )

    def _keep_ended(self, sample_id: str, environment: Any) -> None:
        self._kept[sample_id] = environment

    def draw(self, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Callable[..., Any]]]:
        """Return an environment for a row, or None if there are only tools, and the tools by name."""
        tools = {tool.__name__: tool for tool in self._tools}
        if not self._factories:
            return None, tools
        name = self._name(row)
        pool = self._pools[name]
        try:
            environment = pool.pop()
        except IndexError:
            environment = self._factories[name]()
        # TRL's rule: all public methods of an environment are its tools.
        for own, _ in inspect.getmembers(type(environment), inspect.isfunction):
            if own not in ("reset", "get_reward") and not own.startswith("_"):
                tools[own] = getattr(environment, own)
        return environment, tools

    def _named(self, row: Mapping[str, Any]) -> str | None:
        return row.get("environment") if self._several else None

    def _name(self, row: Mapping[str, Any]) -> str | None:
        """Return the name of a row's environment.

        Raises:
            ValueError: there is no such environment; the message is TRL's.
        """
        name = self._named(row)
        if name not in self._factories:
            raise ValueError(
                f"Example has `environment={name!r}`, which is not among the environments passed to "
                f"`environment_factory`. Expected one of: {list(self._factories)}."
            )
        return name

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that an environment's `reset` receives."""
        return {name: value for name, value in row.items() if name != "environment" or not self._several}

    def encode(self, row: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a row; with environments, the part before the text that `reset` adds."""
        token_ids = self.tokens(row)
        if self._factories:
            # The text of `reset` is unknown here: the prompt ends before the first token that depends on it.
            other, special = self.tokens(row, "APRIL"), self._tokenizer.added_tokens_decoder
            pairs = enumerate(zip(token_ids, other, strict=False))
            same = next((i for i, (one, another) in pairs if one != another), len(token_ids))
            # Back to a special token, which no tokenizer merges with the text that follows.
            while same and token_ids[same - 1] not in special:
                same -= 1
            if not same:
                raise ValueError("environment_factory: the chat template puts no special token before a message")
            token_ids = token_ids[:same]
        return Prompt(tuple(token_ids), metadata=dict(row))

    def tokens(self, row: Mapping[str, Any], said: str = "") -> list[int]:
        """Return the tokens of a row's prompt, with the text of `reset` after its last message, as TRL does."""
        prompt = row.get("prompt", NO_PROMPT) if self._factories else row["prompt"]
        if isinstance(prompt, str):
            raise ValueError('train_dataset: tools need conversations in the column "prompt", and this one holds text')
        *before, last = prompt
        if said:
            blocks = isinstance(last["content"], list)
            last = {**last, "content": last["content"] + ([{"type": "text", "text": said}] if blocks else said)}
        schemas = self._schemas[self._name(row) if self._factories else None]
        given = {"tools": schemas or None, "add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return list(self._tokenizer.apply_chat_template([*before, last], **given, **self._template)["input_ids"])

    async def show(self, trainer: Any, rows: Sequence[Row]) -> None:
        """Pass the environments of `rows` to TRL, in their order, in place of its own. The environments passed before
        become available for new episodes."""
        for episode in self._shown:
            self._pools[episode.name].append(episode.environment)
        if not self._factories:
            return
        self._shown = [await self._ended(row, sample) for row, sample in rows]
        self.environments = [episode.environment for episode in self._shown]
        trainer._environment_pool = {name: [] for name in self._factories}
        for episode in self._shown:
            trainer._environment_pool[episode.name].append(_ResetDone(episode.reset_text))

    def keep(self, sample_ids: set[str]) -> None:
        """Drop the ended episodes of all other samples."""
        self._kept = {id: episode for id, episode in self._kept.items() if id in sample_ids}

    async def _ended(self, row: Mapping[str, Any], sample: Sample) -> ToolEpisode:
        episode = self._kept.pop(sample.id, None)
        if episode is not None:
            return episode
        episode = ToolEpisode(self)
        if fingerprint(episode.reset(row, 0)) != sample.transitions[0].observation:
            log.warning("after a restart an environment's reset returned another observation: its reward may be wrong")
        for index in range(sample.turns):
            token_ids = sample.turn_ids(index)
            said = self.bridge.read(token_ids)
            if not sample.transitions[index + 1].failed:
                answered: Any = episode.step(Turn(sample.id, index, said.text, token_ids, said.message, sample.attempt))
                if inspect.isawaitable(answered):
                    await answered
        return episode

    def warn_of_signals(self, tool: str) -> None:
        """Log once that tools cannot set signals: their calls fail, and the policy only sees the errors."""
        if not self._warned_of_signals:
            self._warned_of_signals = True
            log.warning(
                "tool %s: it sets a signal, which only the main thread may do, and april calls tools in other threads: "
                "all its calls fail; limit its time in another way than by signal.alarm",
                tool,
            )

    def played(self, rows: Sequence[Row]) -> tuple[Any, ...]:
        """Return the values of TRL's own loop over tool calls: masks, conversations, tokens, log-probabilities, calls,
        failures and images."""
        parts = [completion(sample) for _, sample in rows]
        steps = [transition.info for _, sample in rows for transition in sample.transitions]
        return (
            [mask for _, _, _, mask in parts],
            [self.conversation(sample) for _, sample in rows],
            [token_ids for _, token_ids, _, _ in parts],
            [logprobs for _, _, logprobs, _ in parts],
            sum(len(info.get("messages", ())) for info in steps),
            sum(info.get("failures", 0) for info in steps),
            [[] for _ in rows],
        )

    def conversation(self, sample: Sample) -> list[Message]:
        """Return a completion as messages: the policy's turns, and the tool results that the policy has seen."""
        messages: list[Message] = []
        for index, transition in enumerate(sample.transitions):
            if transition.tokens:
                messages += transition.info.get("messages", ())
            if token_ids := sample.turn_ids(index):
                message = self.bridge.read(token_ids).message
                assert message is not None
                messages.append(message)
        return messages


def completion(sample: Sample) -> tuple[list[int], list[int], list[float], list[int]]:
    """Return a sample as TRL trains on it: prompt tokens, completion tokens, log-probabilities of the completion, and a
    mask that is 1 for each token of the policy."""
    prompt_length = sample.transitions[0].tokens if sample.transitions else 0
    token_ids = sample.response_ids
    mask = sample.loss_mask.astype(int).tolist()
    return (
        [*sample.prompt_ids, *token_ids[:prompt_length]],
        token_ids[prompt_length:],
        sample.logprobs.tolist()[prompt_length:],
        mask[prompt_length:],
    )


class TRLBridge(ChatBridge):
    """Render and parse turns as TRL does."""

    def __init__(self, trainer: Any, rows: TRLEpisodes) -> None:
        from trl.chat_template_utils import parse_response

        tokenizer = trainer.processing_class
        self._parse: Callable[..., Any] = parse_response
        self._rows = rows
        self._schemas = [schema_of(tool) for tool in trainer.tools]
        arguments = {
            "tools": self._schemas or None,
            "chat_template": trainer.chat_template,
            **trainer.chat_template_kwargs,
        }
        super().__init__(tokenizer, sorted(trainer.eos_token_ids), arguments=arguments)
        self._prefix = self._renderer.written([{"role": "user", "content": "?"}])
        self.context_length = 0

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int]:
        assert isinstance(observation, str)
        token_ids, head = self._rows.tokens(prompt.metadata, observation), len(prompt.token_ids)
        if tuple(token_ids[:head]) != prompt.token_ids:
            raise ValueError("the text of reset changes the prompt before it")
        if len(token_ids) >= self.context_length:
            raise ValueError(f"a prompt of {len(token_ids)} tokens fills the context, {self.context_length} tokens")
        return token_ids[head:]

    def read(self, token_ids: Sequence[int]) -> Said:
        ids = list(token_ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if not self._schemas:
            return Said(text, {"role": "assistant", "content": text})
        return Said(text, self._parse(self._tokenizer, ids, prefix=self._prefix, tools=self._schemas))


class ToolEpisode:
    """A running episode: one of the user's environments, if there are any, and the tools."""

    def __init__(self, episodes: TRLEpisodes) -> None:
        self._episodes = episodes
        self.name: str | None = None
        self.environment: Any = None
        self.reset_text = ""
        """Text that the environment's reset returned."""
        self._tools: Mapping[str, Callable[..., Any]] = {}
        if episodes.is_async:
            self.step = self._step_async  # type: ignore[method-assign, assignment]

    def reset(self, prompt: Mapping[str, Any], seed: int) -> str:
        self.environment, self._tools = self._episodes.draw(prompt)
        if self.environment is not None:
            self.name = self._episodes._name(prompt)
            said = self.environment.reset(**self._episodes.reset_arguments(prompt))
            if not isinstance(said, str | None):
                raise ValueError(f"reset returned a {type(said).__name__}: april's episodes start with text or nothing")
            self.reset_text = said or ""
        return self.reset_text

    def step(self, turn: Turn) -> EnvStep:
        return _step_of([self._call(call) for call in self._calls(turn)])

    async def _step_async(self, turn: Turn) -> EnvStep:
        calls = self._calls(turn)
        waits = [inspect.iscoroutinefunction(self._tools.get(call["function"]["name"])) for call in calls]
        plain = [await asyncio.to_thread(self._call, call) for call, late in zip(calls, waits, strict=True) if not late]
        late = [self._call_async(call) for call, late in zip(calls, waits, strict=True) if late]
        return _step_of([*plain, *await asyncio.gather(*late)])

    def close(self) -> None:
        """Keep the environment: its reward is needed later."""

    def _calls(self, turn: Turn) -> Sequence[Mapping[str, Any]]:
        message = turn.message or {}
        return message.get("tool_calls") or () if turn.index < self._episodes.most_calls else ()

    def _call(self, call: Mapping[str, Any]) -> tuple[Message, bool]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            return _message(name, self._tool(name)(**arguments)), False
        except Exception as error:
            return self._failed(name, error), True

    async def _call_async(self, call: Mapping[str, Any]) -> tuple[Message, bool]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            return _message(name, await self._tool(name)(**arguments)), False
        except Exception as error:
            return self._failed(name, error), True

    def _failed(self, name: str, error: Exception) -> Message:
        if "signal only works in main thread" in str(error):
            self._episodes.warn_of_signals(name)
        return _message(name, {"error": str(error)})

    def _tool(self, name: str) -> Callable[..., Any]:
        if name not in self._tools:
            raise ValueError(f"Tool {name} not found.")
        return self._tools[name]


class _ResetDone:
    """Replaces an environment that TRL resets before it generates: april has already reset it."""

    def __init__(self, said: str) -> None:
        self._said = said

    def reset(self, **row: Any) -> str:
        return self._said


def _step_of(answers: Sequence[tuple[Message, bool]]) -> EnvStep:
    messages = [message for message, _ in answers]
    info = {"messages": messages, "failures": sum(failed for _, failed in answers)}
    return EnvStep(messages, done=not messages, info=info)


def _message(name: str, said: Any) -> Message:
    return {"role": "tool", "name": name, "content": said if isinstance(said, list) else str(said)}


def _row(prompt: Prompt) -> dict[str, Any]:
    return dict(prompt.metadata)
