"""Extension of conversations by suffixes that are read off the tokenizer's chat template.

Invariants:
- earlier tokens stay: only the last token of a turn is looked at, and no turn is rendered again;
- a suffix is what the chat template writes behind a turn of the assistant, whatever this turn and earlier ones contain;
  construction tests that on the template and refuses a template for which it is false;
- the token that ends a turn is in the sequence once: the policy's, with its log-probability, where the policy drew it,
  the template's where the turn was cut;
- text is tokenised together with the special token before it, and never across tokens that a policy drew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

from tokenizers import AddedToken

from april.rendering.conversation import ConversationRenderer, TemplateError, Tools, encoded, without_sources
from april.rendering.tool_calls import FORMATS, Call, ToolFormat, format_of, message_of
from april.rollout.episodes.environment import Message

MARK = "APRIL0MARK"
"""Stands for a message in the texts that a suffix is read off. No template changes it."""
OTHER_ENDS = ("<|eom_id|>",)
"""Tokens that end a turn as well as the template's own: Llama's "end of message" before a tool answers."""
KEPT = 4096
"""Suffixes that are kept: a template takes a third of a millisecond, and many programs repeat themselves."""
LONGEST_KEPT = 256
"""Tokens of a suffix that is kept: long results of tools do not repeat themselves."""
KEPT_TOOLS = 64
"""Sets of tools whose format is kept."""
NO_TOKEN = AddedToken("\0")
ASKED: Message = {"role": "user", "content": "?"}
SAID: Message = {"role": "assistant", "content": MARK}


class TemplateReader(ConversationRenderer):
    """See `ConversationRenderer`.

    Raises:
        TemplateError: conversations cannot be extended exactly with this template.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int] = (), arguments: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(tokenizer, stop_token_ids, arguments)
        self._roles: set[str] = set()
        """Roles that the template is known to write."""
        self._kept: dict[bytes, Sequence[int]] = {}
        """Suffixes by a digest of their messages and tools, the latest use last."""
        self._formats = lru_cache(KEPT_TOOLS)(self._format)
        answer: Message = {"role": "user", "content": MARK}
        behind = self._behind([ASKED, SAID], [answer])
        if behind != self._behind([ASKED, SAID, ASKED, SAID], [answer]):
            raise TemplateError("the chat template writes a turn differently depending on the turns before it")
        self._ends = set(stop_token_ids) & set(tokenizer.convert_tokens_to_ids(list(OTHER_ENDS)))
        self._stops = frozenset({*stop_token_ids, self._behind([ASKED, SAID], [])[0]})
        opening = self.written([ASKED], generation=True)
        self._opens_thinking = re.search(r"<think>\s*\Z", opening) is not None

    def suffix(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message], tools: Tools
    ) -> Sequence[int]:
        behind = self._suffix(messages, tools)
        last = turn_ids[-1] if turn_ids else None
        if last == behind[0] or last in self._ends:
            return behind[1:]
        if last in self._stops:
            drawn, expected = self._tokenizer.convert_ids_to_tokens([last, behind[0]])
            raise TemplateError(f"the policy ended its turn with {drawn}, the chat template ends it with {expected}")
        return behind

    def read(self, turn_ids: Sequence[int], tools: Tools = ()) -> Message:
        return self.read_text(self.text(turn_ids), tools)

    def read_text(self, text: str, tools: Tools = ()) -> Message:
        form = self._formats(json.dumps(list(tools), sort_keys=True, default=str)) if tools else None
        return message_of(text, form, tools, self._opens_thinking)

    def check_tools(self, tools: Tools) -> None:
        """Check that the template writes calls in one of the known formats, and takes results of tools."""
        if tools:
            self._formats(json.dumps(list(tools), sort_keys=True, default=str))

    def _suffix(self, messages: Sequence[Message], tools: Tools) -> Sequence[int]:
        """Return what the template writes behind any turn."""
        if not self._writes_ids:  # ids differ in every call, and would hide that the messages are equal
            messages = [{key: value for key, value in one.items() if key != "tool_call_id"} for one in messages]
        messages = [without_sources(message) for message in messages]
        written = json.dumps([list(messages), list(tools)], sort_keys=True, default=str)
        key = blake2b(written.encode(), digest_size=16).digest()
        behind = self._kept.pop(key, None)
        if behind is None:
            behind = tuple(self._behind([ASKED, SAID], messages, tools))
        if len(behind) <= LONGEST_KEPT:
            self._kept[key] = behind
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return behind

    @cached_property
    def _writes_ids(self) -> bool:
        """Whether the template writes the ids of calls into the results of tools."""
        result: Message = {"role": "tool", "name": "probe", "tool_call_id": MARK, "content": "?"}
        try:
            return MARK in self._tail([ASKED, SAID], [result], ())
        except TemplateError:
            return True

    def _behind(self, before: Sequence[Message], messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return what the template writes behind a turn: first the token that ends the turn, last what the policy
        continues."""
        for role in {message["role"] for message in messages} - self._roles:
            if MARK not in self._tail(before, [{"role": role, "content": MARK}], tools):
                raise TemplateError(f"the chat template leaves out messages of the role {role!r}")
            self._roles.add(role)
        text = self._tail(before, messages, tools)
        ids = encoded(self._tokenizer, text)
        if not ids or not text.startswith(self._tokenizer.added_tokens_decoder.get(ids[0], NO_TOKEN).content):
            raise TemplateError(f"the chat template ends a turn with text, {text[:12]!r}, and not with a special token")
        return ids

    def _tail(self, before: Sequence[Message], messages: Sequence[Message], tools: Tools) -> str:
        marks = sum(message["content"] == MARK for message in before)
        parts = self.written([*before, *messages], tools).split(MARK, marks)
        if len(parts) != marks + 1:
            raise TemplateError("the chat template does not write what a message says")
        return str(parts[marks])

    def _format(self, tools: str) -> ToolFormat:
        probe: Call = {"name": "probe", "arguments": {"word": MARK}}
        said: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": probe}]}
        offered = json.loads(tools)
        prompted, written = self.written([ASKED], offered), self.written([ASKED, said], offered, generation=False)
        found = format_of(written.removeprefix(prompted), probe)
        if found is None:
            raise TemplateError(f"the chat template writes tool calls in none of the formats {', '.join(FORMATS)}")
        self._behind([ASKED, SAID], [{"role": "tool", "name": "probe", "content": MARK}], offered)
        return found
