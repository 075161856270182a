"""Text and tokens of an episode: an environment's answer becomes the tokens behind the policy's last turn.

Invariants:
- earlier tokens stay: a bridge adds a suffix, and `april.rendering` derives it from the chat template;
- a prompt and `reset`'s answer are together what the chat template writes for their messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from april.rendering.choice import renderer_of
from april.rendering.conversation import TemplateError, encoded, turn_text
from april.rollout.episodes.environment import Message, Observation, Said, TokenIds
from april.rollout.episodes.turns import BadTurn
from april.rollout.stop_strings import up_to_stop
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)


class TextBridge:
    """Without a chat template: the text of an observation follows the turn as it is, the token that ended the turn
    stays where it is.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop_token_ids: tokens that end a turn; they are no part of its text.
        stops: stop strings; the text of a turn ends with its stop string.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = stops

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        return self._ids(observation)

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        return self._ids(observation)

    def read(self, token_ids: Sequence[int]) -> Said:
        return Said(up_to_stop(turn_text(self._tokenizer, token_ids, self._stop_token_ids), self._stops))

    def _ids(self, observation: Observation) -> Sequence[int] | None:
        if isinstance(observation, TokenIds):
            return observation
        if not isinstance(observation, str):
            if observation:
                log.warning("an observation of chat messages needs a tokenizer with a chat template: the episode ends")
                return None
            observation = ""
        return encoded(self._tokenizer, observation)


class ChatBridge:
    """With the tokenizer's chat template.

    A prompt is rendered without the template's generation prompt: `begin` appends it, after the messages of `reset`.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        stop_token_ids: what the policy may end a turn with.
        tools: JSON schemas of the tools that the policy may call; turns are then read as messages with their calls.
        text_role: the role of an observation that is text.
        arguments: further arguments of the chat template, for example `enable_thinking`.
        stops: stop strings; the text of a turn ends with its stop string.

    Raises:
        TemplateError: turns cannot be bridged exactly with this template, or its format of tool calls is not known.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        text_role: str = "user",
        arguments: Mapping[str, Any] | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self._stops = stops
        self._tokenizer = tokenizer
        self._text_role = text_role
        self._tools = list(tools)
        self._arguments = dict(arguments or {})
        self._renderer = renderer_of(tokenizer, stop_token_ids, tools, arguments)
        self._refused: set[str] = set()
        asked: list[Message] = [{"role": "user", "content": "?"}]
        prompt, begun = (self._renderer.written(asked, tools, generation) for generation in (False, True))
        if not begun.startswith(prompt):
            raise TemplateError("the chat template ends a prompt differently where a turn follows")

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        if isinstance(observation, TokenIds):
            return observation
        asked = prompt.metadata.get("prompt", "")
        messages: Sequence[Message] = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        try:
            begun = self._renderer.render([*messages, *self._messages(observation)], self._tools)
            # Images of the prompt are expanded already; what the template writes has one placeholder for each.
            asked_ids = prompt.shown_ids
            head = len(asked_ids)
            if list(begun[:head]) != asked_ids or len(begun) == head:
                raise TemplateError("the prompt is not what the chat template writes before a turn of the policy")
        except (BadTurn, TemplateError) as error:
            self._warn(str(error))
            return None
        return begun[head:]

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        if isinstance(observation, TokenIds):
            return observation
        start, end = sample.turn_span(sample.turns)
        before = [*sample.prompt_ids, *sample.tokens_between(0, start)]
        return self._renderer.extend(
            before, sample.tokens_between(start, end), self._messages(observation), self._tools
        )

    def read(self, token_ids: Sequence[int]) -> Said:
        text = self._renderer.text(token_ids)
        kept = up_to_stop(text, self._stops)
        if not self._tools:
            return Said(kept)
        read = self._renderer.read(token_ids, self._tools) if kept == text else None
        return Said(kept, read or self._renderer.read_text(kept, self._tools))

    def _messages(self, observation: str | Sequence[Message]) -> Sequence[Message]:
        if isinstance(observation, str):
            return [{"role": self._text_role, "content": observation}] if observation else []
        return observation

    def _warn(self, reason: str) -> None:
        """Log each reason once; the run's figures contain the number of episodes."""
        if reason not in self._refused:
            self._refused.add(reason)
            log.warning("an episode ends, since its prompt cannot be continued exactly: %s", reason)

    @property
    def prompt_arguments(self) -> Mapping[str, Any]:
        """What prompts are rendered with: the tools, and no generation prompt."""
        tools = {"tools": self._tools} if self._tools else {}
        return {**self._arguments, **tools, "add_generation_prompt": False}


def bridge_of(
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    chat_template: str = "auto",
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
    stops: Sequence[str] = (),
) -> TextBridge | ChatBridge:
    """The bridge for a tokenizer: with its chat template, unless it has none or `chat_template` is "never".

    Raises:
        TemplateError: tools need a chat template, or turns cannot be bridged exactly with this template.
    """
    if chat_template != "never" and getattr(tokenizer, "chat_template", None):
        return ChatBridge(tokenizer, stop_token_ids, tools, arguments=arguments, stops=stops)
    if tools:
        raise TemplateError("tools need a tokenizer with a chat template: it says how they are offered and called")
    return TextBridge(tokenizer, stop_token_ids, stops)
