"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from anthropic import types
from anthropic.types.raw_message_delta_event import Delta
from pydantic import BaseModel

from april.gateway.fields import flag, items, plain_message, records, short, text_of, texts, tool, whole
from april.gateway.request import (
    Body,
    Request,
    choice_instruction,
    event,
    instructed,
    schema_instruction,
    without_effect,
)
from april.gateway.request_errors import RequestError
from april.gateway.request_images import text_or_parts
from april.rollout.episodes.environment import Message
from april.rollout.episodes.turns import TurnReply, TurnRequest

TAKEN = frozenset(
    [
        "messages",
        "model",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "stream",
        "stop_sequences",
        "output_config",
        "output_format",
        "metadata",
        "service_tier",
        "cache_control",
        "container",
        "betas",
    ]
)
"""Fields that are read, or that mean nothing for the answer."""
DEFAULTS = {"thinking": {"type": "adaptive"}}
BILLING = "x-anthropic-billing-header:"
"""Begins a block of Claude Code's system prompt that differs in every request, for Anthropic's own accounts. The policy
never sees it: no request would extend an earlier one."""
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
"""Types of errors by status; any other is an `invalid_request_error`."""
NAME = 128
"""Characters of a tool's name."""
SIGNATURE = "april"
"""Signature of thinking; clients send it back."""


class AnthropicMessages:
    """Messages API."""

    def read(self, body: Body) -> Request:
        tools, left_out = _tools(body.get("tools"))
        instructions = [*_choice(body.get("tool_choice"), tools), *_format(body)]
        system = _system(body.get("system"))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if body.get("messages") is None:
            raise RequestError("messages: Field required", param="messages")
        given = items(body["messages"], "messages")
        for index, item in enumerate(given):
            plain = plain_message(item)
            messages += [plain] if plain is not None else _messages(item, f"messages[{index}]")
        if not given:
            raise RequestError("messages: at least one message is required", param="messages")
        turn = TurnRequest(
            messages=instructed(messages, instructions),
            tools=tools,
            max_tokens=whole(body, "max_tokens", 1),
            stop=_stop_sequences(body),
        )
        ignored = without_effect(body, TAKEN, DEFAULTS)
        choice = body.get("tool_choice")
        if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use"):
            ignored.append("tool_choice.disable_parallel_tool_use")
        return Request(turn, str(body.get("model") or ""), body, flag(body, "stream"), ignored, left_out)

    def answer(self, request: Request, replies: Sequence[TurnReply]) -> bytes:
        reply = replies[0]
        message = _message(request, reply, _blocks(reply.message), _stop_reason(reply), len(reply.token_ids))
        return message.model_dump_json(exclude_unset=True).encode()

    def waiting(self, request: Request, waited: int) -> bytes:
        return event(b'{"type":"ping"}', "ping")

    def events(self, request: Request, replies: Sequence[TurnReply], waited: int = 0) -> Iterator[bytes]:
        reply = replies[0]
        for written in _sequence(_message(request, reply, [], None, 0), reply):
            yield event(written.model_dump_json(exclude_unset=True).encode(), getattr(written, "type", ""))

    def error(self, error: RequestError) -> bytes:
        kind = KINDS.get(int(error.status), "invalid_request_error" if error.status < 500 else "api_error")
        message = error.anthropic or error.message
        body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
        return json.dumps(body, ensure_ascii=False).encode()

    def error_event(self, error: RequestError) -> bytes:
        return event(self.error(error), "error")


def _system(given: Any) -> str:
    blocks = [given] if isinstance(given, str) else given
    if isinstance(blocks, list):
        return "".join(text for block in blocks if not (text := text_of([block], "system")).startswith(BILLING))
    return text_of(blocks, "system")


def _tools(given: Any) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the tools with a schema, and the types of Anthropic's own tools, which the policy is not offered."""
    tools: list[Mapping[str, Any]] = []
    left_out: list[str] = []
    for where, item in records(given or (), "tools"):
        if item.get("type") not in (None, "custom"):
            left_out.append(short(item.get("type")))
        elif "input_schema" not in item:
            raise RequestError(f"{where}.input_schema: Field required", param=where)
        else:
            tools.append(tool(item.get("name"), item.get("description"), item["input_schema"], where, NAME))
    if left_out and not tools:
        raise RequestError(
            f"tools: the policy takes tools with an input_schema of their own, not {left_out[0]}", param="tools"
        )
    return tools, left_out


def _stop_sequences(body: Body) -> Sequence[str]:
    stops = texts(body, "stop_sequences")
    if not all(stop.strip() for stop in stops):
        raise RequestError("stop_sequences: each stop sequence must contain non-whitespace", param="stop_sequences")
    return stops


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if choice is None or kind == "auto":
        return []
    if kind == "none" or (kind == "any" and tools):
        return choice_instruction("none" if kind == "none" else "required") if tools else []
    name = choice.get("name") if kind == "tool" and isinstance(choice, Mapping) else None
    if name not in [one["function"]["name"] for one in tools]:
        raise RequestError(f"tool_choice: {short(choice)} names none of the tools", param="tool_choice")
    return choice_instruction(None, name)


def _format(body: Body) -> list[str]:
    """Return the text of a schema for the answer, which acts through the prompt only."""
    config = body.get("output_config")
    form = body.get("output_format") or (config.get("format") if isinstance(config, Mapping) else None)
    if form is None:
        return []
    schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise RequestError(f"output_config.format: expected a JSON schema, got {short(form)}", param="output_config")
    return schema_instruction(schema)


def _messages(item: Any, where: str) -> list[Message]:
    """Return one of Anthropic's messages as the core's: results of tools are messages of their own."""
    if not isinstance(item, Mapping):
        raise RequestError(f"{where}: expected an object, got {short(item)}", param=where)
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role: expected 'user' or 'assistant', got {short(role)}", param=where)
    if content is None:
        raise RequestError(f"{where}.content: Field required", param=where)
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": text_of(content, f"{where}.content")}]
    blocks = list(records(content, f"{where}.content"))
    if role == "assistant":
        return [_assistant(blocks)]
    messages: list[Message] = []
    said: list[Mapping[str, Any]] = []
    for at, block in blocks:
        if block.get("type") != "tool_result":
            said.append(block)
            continue
        if said:
            messages.append({"role": "user", "content": text_or_parts(said, f"{where}.content")})
            said = []
        given = str(block.get("tool_use_id") or "")
        messages.append({"role": "tool", "tool_call_id": given, "content": text_or_parts(block.get("content"), at)})
    own: Message = {"role": "user", "content": text_or_parts(said, f"{where}.content")}
    return [*messages, own] if said or not messages else messages


def _assistant(blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> Message:
    text, thinking, calls = [], [], []
    for at, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thinking.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), Mapping):
                raise RequestError(f"{at}: a call has a name and an input", param=at)
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            text.append(text_of([block], at))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    return {**message, "tool_calls": calls} if calls else message


def _blocks(message: Message) -> list[BaseModel]:
    blocks: list[BaseModel] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append(types.ThinkingBlock(type="thinking", thinking=reasoning, signature=SIGNATURE))
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        blocks.append(types.TextBlock(type="text", text=message.get("content") or "", citations=None))
    for call in calls:
        function = call["function"]
        given = json.loads(function["arguments"])
        blocks.append(types.ToolUseBlock(type="tool_use", id=call["id"], name=function["name"], input=given))
    return blocks


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


def _stop_reason(reply: TurnReply) -> StopReason:
    if reply.end == "length":
        return "max_tokens"
    if reply.stop is not None:
        return "stop_sequence"
    return "tool_use" if reply.message.get("tool_calls") else "end_turn"


def _message(
    request: Request, reply: TurnReply, blocks: Sequence[Any], stop: StopReason | None, drawn: int
) -> types.Message:
    return types.Message(
        id=f"msg_{reply.node_id}",
        type="message",
        role="assistant",
        model=request.model,
        content=list(blocks),
        stop_reason=stop,
        stop_sequence=None if stop is None else reply.stop,
        usage=types.Usage(
            input_tokens=len(reply.prompt_ids),
            output_tokens=drawn,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=0,
        ),
    )


def _sequence(begun: types.Message, reply: TurnReply) -> Iterator[BaseModel]:
    yield types.RawMessageStartEvent(type="message_start", message=begun)
    for index, block in enumerate(_blocks(reply.message)):
        empty, deltas = _deltas(block)
        yield types.RawContentBlockStartEvent(type="content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield types.RawContentBlockDeltaEvent(type="content_block_delta", index=index, delta=delta)
        yield types.RawContentBlockStopEvent(type="content_block_stop", index=index)
    yield types.RawMessageDeltaEvent(
        type="message_delta",
        delta=Delta(stop_reason=_stop_reason(reply), stop_sequence=reply.stop),
        usage=types.MessageDeltaUsage(output_tokens=len(reply.token_ids)),
    )
    yield types.RawMessageStopEvent(type="message_stop")


def _deltas(block: BaseModel) -> tuple[Any, list[Any]]:
    """Return a block without its content, and the deltas that bring the content."""
    if isinstance(block, types.ThinkingBlock):
        return block.model_copy(update={"thinking": "", "signature": ""}), [
            types.ThinkingDelta(type="thinking_delta", thinking=block.thinking),
            types.SignatureDelta(type="signature_delta", signature=block.signature),
        ]
    if isinstance(block, types.ToolUseBlock):
        written = json.dumps(block.input, ensure_ascii=False)
        return block.model_copy(update={"input": {}}), [
            types.InputJSONDelta(type="input_json_delta", partial_json=written)
        ]
    assert isinstance(block, types.TextBlock)
    return block.model_copy(update={"text": ""}), [types.TextDelta(type="text_delta", text=block.text)]
