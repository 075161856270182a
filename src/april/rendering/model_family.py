"""Extension of conversations by the package `renderers`, for templates that cannot be read.

The package contains a renderer for each of some thirty model families, each a copy of the family's template in Python.

Invariant: a family's renderer is used only for a tokenizer whose own chat template writes the probes of this module
token for token as that renderer does, both whole conversations and extended ones. The name of a model proves nothing:
fine-tuned models have other templates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from april.rendering.conversation import ConversationRenderer, TemplateError, Tools, encoded
from april.rendering.tool_calls import ERRORS
from april.rollout.episodes.environment import Message
from april.rollout.trajectory.features import sources_in

log = logging.getLogger(__name__)

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A word."}, "count": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
CALL: Mapping[str, Any] = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "probe", "arguments": {"word": "Sète 中", "count": 3}},
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ASKED: Message = {"role": "user", "content": "What is it?"}
SAID: Message = {"role": "assistant", "content": "It is 3."}
MORE: Message = {"role": "user", "content": "And then?"}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe", "content": '{"found": 5}'}

TURNS = ("It is 3.", "So.\n</think>\n\nIt is 3.", "<think>So.</think>\nIt is 3.")
"""Turns with thinking and without: what follows a turn depends on its end only, but a renderer refuses some."""

Conversation = tuple[Sequence[Message], Sequence[Message]]
PLAIN: Sequence[Conversation] = (
    ((ASKED, SAID), (MORE,)),
    ((SYSTEM, ASKED, SAID), (MORE,)),
    ((SYSTEM, ASKED, SAID, MORE, SAID), (MORE,)),
)
"""Conversations that end with a turn of the policy, and the messages that extend them."""
WITH_TOOLS: Sequence[Conversation] = (
    ((ASKED, CALLED), (RESULT,)),
    ((SYSTEM, ASKED, CALLED, RESULT, SAID), (MORE,)),
)


class ModelFamily(ConversationRenderer):
    """See `ConversationRenderer`.

    Args:
        family: name of a renderer of the package.

    Raises:
        TemplateError: the family's renderer does not agree with the tokenizer's chat template.
    """

    def __init__(
        self,
        family: str,
        tokenizer: Any,
        stop_token_ids: Sequence[int] = (),
        arguments: Mapping[str, Any] | None = None,
        tools: bool = True,
    ) -> None:
        super().__init__(tokenizer, stop_token_ids, arguments)
        self.family = family
        self._reads_calls = tools
        whole = _renderer(family, tokenizer, self._arguments)
        # Drawn thinking stays in the conversation, as in `TemplateReader`.
        self._own = _renderer(family, tokenizer, self._arguments, thinking_retention="all")
        self._stops = frozenset({*stop_token_ids, *self._own.get_stop_token_ids()})
        self._prompt = list(self.render([ASKED]))
        """Any prompt: whether it ends inside thinking is what a turn's reading depends on."""
        self._exact: set[tuple[str, int | None]] = set()
        """Roles after a turn, with the tokens that may end the turn before them; None: the turn was cut."""
        for offered, probes in (((), PLAIN), ((PROBE_TOOL,), WITH_TOOLS if tools else ())):
            for messages, following in probes:
                self._check(whole, messages, following, offered)

    def check_tools(self, tools: Tools) -> None:
        if tools and not self._reads_calls:
            raise TemplateError(f"the renderer {self.family} does not read calls of this chat template")

    def suffix(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message], tools: Tools
    ) -> Sequence[int]:
        if sources_in(messages):
            raise TemplateError(f"the renderer {self.family} of the package renderers is used for text alone")
        end = turn_ids[-1] if turn_ids and turn_ids[-1] in self._stops else None
        if messages and (messages[0]["role"], end) not in self._exact:
            drawn = "no end of a turn" if end is None else self._tokenizer.convert_ids_to_tokens([end])[0]
            raise TemplateError(f"the policy ended its turn with {drawn}, where {messages[0]['role']} follows")
        return self._extended(prompt_ids, turn_ids, messages, tools)

    def _extended(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message], tools: Tools
    ) -> Sequence[int]:
        before = [*prompt_ids, *turn_ids]
        extended = self._own.bridge_to_next_turn(
            list(prompt_ids), list(turn_ids), [dict(m) for m in messages], tools=list(tools) or None
        )
        if extended is None or extended.token_ids[: len(before)] != before:
            raise TemplateError(f"the renderer {self.family} of the package renderers does not extend this turn")
        added: list[int] = extended.token_ids[len(before) :]
        return added

    def read(self, turn_ids: Sequence[int], tools: Tools = ()) -> Message:
        parsed = self._own.parse_response(list(turn_ids), tools=list(tools) or None, prompt_ids=self._prompt)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content.strip("\n")
        if not tools:
            return message
        good = [call for call in parsed.tool_calls if call.status == "ok" and isinstance(call.arguments, dict)]
        if good:
            message["tool_calls"] = [
                {
                    **({"id": call.id} if call.id else {}),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in good
            ]
        if errors := [call for call in parsed.tool_calls if call not in good]:
            message["content"] += "".join(call.raw for call in errors)
            message[ERRORS] = [f"a tool call cannot be read ({call.status}): {call.raw[:200]}" for call in errors]
        return message

    def read_text(self, text: str, tools: Tools = ()) -> Message:
        return self.read(encoded(self._tokenizer, text), tools)

    def _check(self, renderer: Any, messages: Sequence[Message], following: Sequence[Message], tools: Tools) -> None:
        """Compare a conversation and its extension with the chat template.

        Raises:
            TemplateError: they differ.
        """
        refused = TemplateError(f"the renderer {self.family} differs from the chat template")
        prompt, whole = self.render(messages[:-1], tools), self.render([*messages, *following], tools)
        plain = [dict(message) for message in (*messages, *following)]
        if list(renderer.render_ids(plain, tools=list(tools) or None, add_generation_prompt=True)) != list(whole):
            raise refused
        exact: set[tuple[str, int | None]] = set()
        for text, end in product(TURNS, (None, *self._stops)):
            turn, ending = encoded(self._tokenizer, text), [] if end is None else [end]
            with suppress(TemplateError):
                tail = [*ending, *self._extended(prompt, [*turn, *ending], following, tools)]
                if list(whole[len(whole) - len(tail) :]) == tail:
                    exact.add((following[0]["role"], end))
        if not any(end is not None for _, end in exact):
            raise refused
        self._exact |= exact


def families() -> Iterator[str]:
    """Yield the names of the package's renderers.

    Raises:
        ModuleNotFoundError: the package is missing.
    """
    from renderers.base import MODEL_RENDERER_MAP

    yield from sorted(set(MODEL_RENDERER_MAP.values()))


def family_of(
    tokenizer: Any, stop_token_ids: Sequence[int], tools: bool, arguments: Mapping[str, Any] | None
) -> ModelFamily | None:
    """Return the first family whose renderer agrees with the tokenizer's chat template; None if there is none."""
    for family in families():
        with suppress(Exception):  # a renderer refuses other families' tokenizers with any error
            return ModelFamily(family, tokenizer, stop_token_ids, arguments, tools)
    return None


def _renderer(family: str, tokenizer: Any, arguments: Mapping[str, Any], **settings: Any) -> Any:
    from pydantic import TypeAdapter
    from renderers import create_renderer
    from renderers.configs import RendererConfig

    known: TypeAdapter[Any] = TypeAdapter(RendererConfig)
    fields = type(known.validate_python({"name": family})).model_fields
    taken = {name: value for name, value in settings.items() if name in fields}
    config = known.validate_python({"name": family, **taken})
    return create_renderer(tokenizer, config, chat_template_kwargs=arguments)
