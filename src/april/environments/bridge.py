"""Text and tokens of an episode: what an environment says becomes the tokens behind the policy's last turn.

Invariants:
- what is there stays: no bridge looks at the tokens of earlier turns but the last one, and none renders them again;
- a suffix is what the chat template writes behind an assistant's turn, whatever the turn and the turns before it say;
  that a template keeps to this is tried when the bridge is made, and a template that does not is refused;
- the token that ends a turn is in the sample once: the policy's, with its log-probability, where it drew it, the
  template's where the turn was cut;
- text is tokenised together with the special token before it, and never across what a policy sampled.

The package `renderers` writes such suffixes from its own copy of each model family's template, and none for a template
that it does not know. Here they are read off the template that the tokenizer has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken

from april.environments.tool_calls import FORMATS, Call, ToolFormat, format_of, message_of
from april.rollout.episodes.environment import Message, Observation, Said, TokenIds
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

MARK = "APRIL0MARK"
"""Stands for a message in the texts that a suffix is read off. No template changes it."""


OTHER_ENDS = ("<|eom_id|>",)
"""Tokens that end a turn as well as the template's own: Llama's "end of message" before a tool answers."""
KEPT = 4096
"""Texts whose tokens are kept."""
NO_TOKEN = AddedToken("\0")


class TemplateError(ValueError):
    """A chat template with which turns cannot be bridged exactly."""


class TextBridge:
    """Without a chat template: the text of an observation follows the turn as it is, the token that ended the turn
    stays where it is.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop_token_ids: what ends a turn; it is no part of a turn's text.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        return self._ids(observation)

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        return self._ids(observation)

    def read(self, token_ids: Sequence[int]) -> Said:
        return Said(_text(self._tokenizer, token_ids, self._stops))

    def _ids(self, observation: Observation) -> Sequence[int] | None:
        if isinstance(observation, TokenIds):
            return observation
        if not isinstance(observation, str):
            if observation:
                log.warning("an observation of chat messages needs a tokenizer with a chat template: the episode ends")
                return None
            observation = ""
        return _encode(self._tokenizer, observation)


class ChatBridge:
    """With the tokenizer's chat template.

    A prompt is rendered without the template's generation prompt: `begin` puts that behind it, after what `reset` says.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        stop_token_ids: what the policy may end a turn with.
        tools: JSON schemas of the tools that the policy may call; turns are then read as messages with their calls.
        text_role: the role of an observation that is text.
        arguments: of the chat template, beside the messages: `enable_thinking`, for example.

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
    ) -> None:
        self._tokenizer = tokenizer
        self._text_role = text_role
        self._arguments = dict(arguments or {}) | ({"tools": list(tools)} if tools else {})
        self._roles: set[str] = set()
        """Roles that the template is known to write."""
        self._behind_text = lru_cache(KEPT)(lambda text: self._behind_turn(self._messages(text)))
        """A template takes a third of a millisecond, and most environments repeat themselves."""
        self._refused: set[str] = set()
        self._said: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        behind = self._behind_turn([{"role": text_role, "content": MARK}])
        if behind != self._behind_turn([{"role": text_role, "content": MARK}], [*self._said, *self._said]):
            raise TemplateError("the chat template writes a turn differently depending on the turns before it")
        self._behind_prompt("user", [])
        self._ends = set(stop_token_ids) & set(tokenizer.convert_tokens_to_ids(list(OTHER_ENDS)))
        self._stops = frozenset({*stop_token_ids, behind[0]})
        self._format: ToolFormat | None = self._tool_format() if tools else None

    def begin(self, prompt: Prompt, observation: Observation) -> Sequence[int] | None:
        if isinstance(observation, TokenIds):
            return observation
        first = prompt.metadata.get("prompt")
        role = first[-1]["role"] if isinstance(first, Sequence) and not isinstance(first, str) and first else "user"
        try:
            closing, behind = self._behind_prompt(role, self._messages(observation))
            if closing and list(prompt.token_ids[-len(closing) :]) != closing:
                raise TemplateError("the prompt does not end as the chat template ends one without generation prompt")
        except TemplateError as error:
            self._warn(error)
            return None
        return behind

    def extend(self, sample: Sample, observation: Observation) -> Sequence[int] | None:
        if isinstance(observation, TokenIds):
            return observation
        last = sample.segments[-1].token_ids[-1] if sample.segments else None
        try:
            text = isinstance(observation, str)
            behind = self._behind_text(observation) if text else self._behind_turn(self._messages(observation))
            if last == behind[0] or last in self._ends:
                return behind[1:]
            if last in self._stops:
                drawn, expected = self._tokenizer.convert_ids_to_tokens([last, behind[0]])
                raise TemplateError(
                    f"the policy ended its turn with {drawn}, the chat template ends it with {expected}"
                )
        except TemplateError as error:
            self._warn(error)
            return None
        return behind

    def read(self, token_ids: Sequence[int]) -> Said:
        text = _text(self._tokenizer, token_ids, self._stops)
        return Said(text, message_of(text, self._format) if self._format else None)

    def _messages(self, observation: str | Sequence[Message]) -> Sequence[Message]:
        if isinstance(observation, str):
            return [{"role": self._text_role, "content": observation}] if observation else []
        if any(message["role"] == "assistant" for message in observation):
            raise TemplateError("an observation holds a message of the assistant, which only the policy writes")
        return observation

    def _warn(self, refusal: TemplateError) -> None:
        """Every reason is said once; how often it ended an episode is in the run's figures."""
        if str(refusal) not in self._refused:
            self._refused.add(str(refusal))
            log.warning("an episode ends, since its next turn cannot be put behind the last exactly: %s", refusal)

    def _behind_prompt(self, role: str, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """How the template ends a prompt whose last message has `role`, and what it puts behind that."""
        asked: list[Message] = [{"role": role, "content": MARK}]
        closing = _encode(self._tokenizer, self._rendered(asked, False).rpartition(MARK)[2])
        behind = _encode(self._tokenizer, self._behind(asked, messages))
        if behind[: len(closing)] != closing:
            raise TemplateError("the chat template ends a prompt differently where a turn follows")
        return closing, behind[len(closing) :]

    def _behind_turn(self, messages: Sequence[Message], said: Sequence[Message] | None = None) -> list[int]:
        """What the template puts behind a turn: first the token that ends it, last what the policy continues."""
        text = self._behind(said or self._said, messages)
        ids = _encode(self._tokenizer, text)
        if not ids or not text.startswith(self._tokenizer.added_tokens_decoder.get(ids[0], NO_TOKEN).content):
            raise TemplateError(f"the chat template ends a turn with text, {text[:12]!r}, and not with a special token")
        return ids

    def _behind(self, before: Sequence[Message], messages: Sequence[Message]) -> str:
        """What the template writes behind the last message of `before`, whose content is `MARK`."""
        for role in {message["role"] for message in messages} - self._roles:
            if MARK not in self._tail(before, [{"role": role, "content": MARK}]):
                raise TemplateError(f"the chat template leaves out messages of the role {role!r}")
            self._roles.add(role)
        return self._tail(before, messages)

    def _tail(self, before: Sequence[Message], messages: Sequence[Message]) -> str:
        marks = sum(message["content"] == MARK for message in before)
        parts = self._rendered([*before, *messages], True).split(MARK, marks)
        if len(parts) != marks + 1:
            raise TemplateError("the chat template does not write what a message says")
        return str(parts[marks])

    def _rendered(self, messages: Sequence[Message], generation: bool) -> str:
        try:
            plain = [dict(message) for message in messages]
            arguments = {**self._arguments, "add_generation_prompt": generation}
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, **arguments))
        except Exception as error:  # whatever a template raises
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateError(f"the chat template does not take messages of the roles {roles}: {error}") from None

    def _tool_format(self) -> ToolFormat:
        probe: Call = {"name": "probe", "arguments": {"word": MARK}}
        call = {"type": "function", "function": probe}
        asked: Message = {"role": "user", "content": "?"}
        said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        prompted, written = self._rendered([asked], True), self._rendered([asked, said], False)
        found = format_of(written.removeprefix(prompted), probe)
        if found is None:
            raise TemplateError(f"the chat template writes tool calls in none of the formats {', '.join(FORMATS)}")
        self._behind_turn([{"role": "tool", "name": "probe", "content": MARK}])
        return found

    @property
    def prompt_arguments(self) -> Mapping[str, Any]:
        """What prompts are rendered with: the tools, and no generation prompt."""
        return {**self._arguments, "add_generation_prompt": False}


def bridge_of(
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    chat_template: str = "auto",
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> TextBridge | ChatBridge:
    """The bridge for a tokenizer: with its chat template, unless it has none or `chat_template` is "never".

    Raises:
        TemplateError: names what is missing.
    """
    if chat_template != "never" and getattr(tokenizer, "chat_template", None):
        return ChatBridge(tokenizer, stop_token_ids, tools, arguments=arguments)
    if tools:
        raise TemplateError("tools need a tokenizer with a chat template: it says how they are offered and called")
    return TextBridge(tokenizer, stop_token_ids)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []


def _text(tokenizer: Any, token_ids: Sequence[int], stops: frozenset[int]) -> str:
    """A turn's text, without the token that ended it."""
    ended = bool(token_ids) and token_ids[-1] in stops
    text: str = tokenizer.decode(token_ids[: len(token_ids) - ended], clean_up_tokenization_spaces=False)
    return text
