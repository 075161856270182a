"""What the converters between messages and tokens share: rendering by the chat template, and the APIs' form of a turn.

Invariants:
- a whole conversation is rendered by the tokenizer's own chat template, never by a copy of it;
- a turn in the APIs' form reads back as itself: what a client sends back renders as the turn that it was;
- a turn in the APIs' form consists of JSON types that UTF-8 can encode, whatever the policy drew.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any

from april.rendering.tool_calls import ERRORS
from april.rollout.episodes.environment import Message
from april.rollout.episodes.turns import BadTurn
from april.rollout.json_types import encodable, json_types
from april.rollout.stop_strings import Decode, Stop, before_stop_token
from april.rollout.trajectory.features import parts_of

log = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]


class TemplateError(ValueError):
    """A chat template with which turns cannot be extended exactly."""


class ConversationRenderer(ABC):
    """A `Renderer` for a tokenizer with a chat template.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        stop_token_ids: tokens with which the policy may end a turn.
        arguments: further arguments of the chat template, such as `enable_thinking`.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int] = (), arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = decoder(tokenizer)
        self._arguments = dict(arguments or {})
        self._stops = frozenset(stop_token_ids)
        self._refused: set[str] = set()

    @property
    def stop_token_ids(self) -> Sequence[int]:
        return sorted(self._stops)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Sequence[int]:
        try:
            self.check_tools(tools)
            return encoded(self._tokenizer, self.written(messages, tools))
        except TemplateError as error:
            raise BadTurn(str(error)) from None

    def extend(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message], tools: Tools = ()
    ) -> Sequence[int] | None:
        try:
            if any(message["role"] == "assistant" for message in messages):
                raise TemplateError("a message of the assistant follows, which the policy did not draw")
            return self.suffix(prompt_ids, turn_ids, messages, tools)
        except TemplateError as error:
            if str(error) not in self._refused:  # the run's figures contain the number
                self._refused.add(str(error))
                log.warning("a turn cannot be put behind the last one exactly: %s", error)
            return None

    @property
    def decode(self) -> Decode:
        return self._decode

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), node_id: str = "", stop: Stop | None = None) -> Message:
        text = None if stop is None else self.text(turn_ids)[: stop.at]
        try:
            read = self.read(turn_ids, tools) if text is None else self.read_text(text, tools)
            message: dict[str, Any] = json_types(dict(read), "a turn")
        except Exception as error:  # the policy may draw anything; a turn that cannot be read is text
            log.warning("a turn is passed on as text, since it cannot be read: %s", error)
            message = {"role": "assistant", "content": encodable(self.text(turn_ids) if text is None else text)}
        message.pop(ERRORS, None)
        if calls := message.get("tool_calls"):
            # APIs allow letters, digits, "_" and "-" in ids; the names of turns have other characters.
            digest = blake2b(node_id.encode(), digest_size=8).hexdigest()
            message["tool_calls"] = [
                {
                    "id": call.get("id") or f"call_{digest}_{index}",
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for index, call in enumerate(calls)
            ]
        return message

    def pieces(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Return the bytes of each token."""
        return [self._tokenizer.decode([token]).encode() for token in token_ids]

    @abstractmethod
    def check_tools(self, tools: Tools) -> None:
        """Check that calls of these tools can be read.

        Raises:
            TemplateError: they cannot.
        """

    @abstractmethod
    def suffix(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message], tools: Tools
    ) -> Sequence[int]:
        """Return the tokens of `extend`.

        Raises:
            TemplateError: there are none that leave the earlier tokens unchanged.
        """

    @abstractmethod
    def read(self, turn_ids: Sequence[int], tools: Tools = ()) -> Message:
        """Return a turn as a message whose calls have arguments as JSON types, and under `ERRORS` the reasons why other
        calls cannot be read. With such errors, `content` contains the text of those calls."""

    @abstractmethod
    def read_text(self, text: str, tools: Tools = ()) -> Message:
        """`read` for the text of a turn, without the token that ended it."""

    def written(self, messages: Sequence[Message], tools: Tools = (), generation: bool = True) -> str:
        """Return a conversation as the chat template writes it.

        Raises:
            TemplateError: the template does not take it.
        """
        arguments = {
            **self._arguments,
            "add_generation_prompt": generation,
            **({"tools": list(tools)} if tools else {}),
        }
        try:
            plain = [_for_template(message) for message in messages]
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, **arguments))
        except Exception as error:  # whatever a template raises
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateError(f"the chat template does not take messages of the roles {roles}: {error}") from None

    def text(self, turn_ids: Sequence[int]) -> str:
        """Return a turn's text, without the token that ended it."""
        return turn_text(self._tokenizer, turn_ids, self._stops)


def turn_text(tokenizer: Any, turn_ids: Sequence[int], stops: frozenset[int]) -> str:
    return decoder(tokenizer)(before_stop_token(turn_ids, stops))


def decoder(tokenizer: Any) -> Decode:
    """Return the function that decodes tokens, special ones included."""
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []


def without_sources(message: Message) -> Message:
    """Return a message whose images have no sources: a template writes the same for each image."""
    if not any(parts_of(message)):
        return message
    return {**message, "content": [_unnamed(part) for part in message["content"]]}


def _unnamed(part: Any) -> Any:
    return {"type": "image"} if isinstance(part, Mapping) and part.get("type") == "image" else part


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON types: templates iterate over them."""
    plain = dict(without_sources(message))
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [{**call, "function": _decoded(call["function"])} for call in calls]
    return plain


def _decoded(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            return {**function, "arguments": json_types(json.loads(arguments), "arguments")}
    return function
