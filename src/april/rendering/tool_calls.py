"""How a policy calls tools: the formats of chat templates, read.

Invariants:
- the format of a template is the one that reads back what the template writes;
- a call that cannot be read is an error with its reason, for the policy to learn from; it is never passed over;
- the arguments of a call are JSON types that UTF-8 can encode: nesting beyond `json_types.DEEPEST`, NaN and the like
  are errors of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from april.rollout.episodes.environment import Message
from april.rollout.json_types import encodable, json_types

Call: TypeAlias = Mapping[str, Any]
"""`{"name": ..., "arguments": {...}}`."""
ToolFormat: TypeAlias = Callable[[str], Iterator["Call | BadCall"]]
"""Reads the calls of a turn's text, in their order."""

ERRORS = "tool_call_errors"
"""Key of a message for unreadable calls: the error of each."""


class BadCall(str):
    """The error of a call, in a sentence for the policy."""

    __slots__ = ()


def hermes(text: str) -> Iterator[Call | BadCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    for body, end in re.findall(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL):
        yield _json_call(body, "arguments") if end else BadCall("a tool call does not end with </tool_call>")


def llama(text: str) -> Iterator[Call | BadCall]:
    """A turn that is nothing but `{"name": ..., "parameters": {...}}`: Llama 3. Several stand behind semicolons."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{") or not re.search(r'"name"\s*:', body):
        return
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            end = len(body)
        yield _json_call(body[at:end], "parameters")
        at = end + len(re.match(r"[\s;]*", body[end:]).group())  # type: ignore[union-attr]


def qwen_xml(text: str) -> Iterator[Call | BadCall]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""
    for body, end in re.findall(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL):
        named = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", body, re.DOTALL)
        if not end:
            yield BadCall("a tool call does not end with </tool_call>")
        elif not named:
            yield BadCall("a tool call must hold <function=NAME>…</function>")
        else:
            values = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", named[2], re.DOTALL)
            yield {"name": named[1], "arguments": dict(values)}


FORMATS: Mapping[str, ToolFormat] = {"hermes": hermes, "llama": llama, "qwen-xml": qwen_xml}


def format_of(written: str, call: Call) -> ToolFormat | None:
    """The format in which a template wrote `call`; None if it is none of `FORMATS`."""
    body = re.sub(r"(<\|[^|>]*\|>|</s>)\s*\Z", "", written.strip())  # the token that ends the turn
    for read in FORMATS.values():
        if list(read(body)) == [call]:
            return read
    return None


def message_of(
    text: str, read: ToolFormat | None, tools: Sequence[Mapping[str, Any]] = (), opened: bool = False
) -> Message:
    """Return a turn's text as the assistant's message. Calls are read behind the policy's thinking, not in it.

    Args:
        read: format of calls; None: no tools were offered.
        tools: schemas of the tools, for arguments that a format writes as bare text.
        opened: the prompt ends inside thinking, so that text without an end of thinking is thinking.
    """
    thought, closed, said = text.rpartition("</think>")
    if opened and not closed:
        thought, closed, said = text, "</think>", ""
    found = list(read(said)) if read is not None else []
    calls = [call for call in found if not isinstance(call, BadCall)]
    errors = [str(call) for call in found if isinstance(call, BadCall)]
    message: dict[str, Any] = {"role": "assistant", "content": said.lstrip("\n") if closed else said}
    if calls and not errors:
        message["content"] = _before_calls(message["content"])
    if thought.strip():
        message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
    if calls:
        message["tool_calls"] = [{"type": "function", "function": _typed(call, read, tools)} for call in calls]
    if errors:
        message[ERRORS] = errors
    return message


def _before_calls(said: str) -> str:
    """Return the text of a turn before its calls; a call of Llama's is the whole turn."""
    text, marker, _ = said.partition("<tool_call>")
    return text.strip() if marker else ""


def _typed(call: Call, read: ToolFormat | None, tools: Sequence[Mapping[str, Any]]) -> Call:
    """Return a call whose bare text is converted to the types of the tool's schema."""
    if read is not qwen_xml:
        return call
    functions = (tool.get("function", tool) for tool in tools)
    schema = next((f.get("parameters") for f in functions if f.get("name") == call["name"]), None) or {}
    properties = schema.get("properties") or {}
    return {**call, "arguments": {key: _value(text, properties.get(key)) for key, text in call["arguments"].items()}}


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in (None, "string") or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json_types(json.loads(text), "a parameter")
    except (ValueError, RecursionError):
        return text


def _json_call(body: str, arguments_key: str) -> Call | BadCall:
    try:
        call = json.loads(body)
    except ValueError as error:
        return BadCall(f"a tool call is no valid JSON: {error}")
    except RecursionError:
        return BadCall("a tool call is nested too deeply")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return BadCall(f'a tool call must be a JSON object with "name" and "{arguments_key}"')
    arguments = call.get(arguments_key, call.get("arguments", call.get("parameters", {})))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    name = encodable(call["name"])
    if not isinstance(arguments, dict):
        return BadCall(f'"{arguments_key}" of the call of {name} must be a JSON object')
    try:
        return {"name": name, "arguments": json_types(arguments, f'"{arguments_key}" of the call of {name}')}
    except ValueError as error:
        return BadCall(str(error))
