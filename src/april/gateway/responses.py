"""OpenAI's Responses API: `/v1/responses`.

The items of one turn (reasoning, message, calls of functions) are one message of the assistant for the core, and a
response's id contains the turn's name, which `previous_response_id` gives back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types import responses as types
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_output_text import Logprob
from openai.types.responses.response_reasoning_item import Content
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from april.gateway.chat_completions import openai_error, token_logprobs
from april.gateway.fields import flag, functions, items, plain_message, records, short, text_of, tool, whole
from april.gateway.openai_instructions import answer_format, tool_choice
from april.gateway.request import (
    Body,
    Request,
    Tokens,
    event,
    instructed,
    without_effect,
)
from april.gateway.request_errors import RequestError
from april.gateway.request_images import text_or_parts
from april.rollout.episodes.environment import Message
from april.rollout.episodes.turns import TurnReply, TurnRequest

TAKEN = frozenset(
    [
        "input",
        "model",
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "background",
        "conversation",
        "prompt",
        "previous_response_id",
        "include",
        "max_output_tokens",
        "stream",
        "stream_options",
        "store",
        "metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "client_metadata",
    ]
)
"""Fields that are read, or that mean nothing for the answer."""
DEFAULTS = {"parallel_tool_calls": True, "truncation": "disabled"}
ID = "resp_"
ROLES = {"system": "system", "developer": "system", "user": "user"}


class Responses:
    """Responses API.

    Args:
        tokens: text of tokens, for log-probabilities.
    """

    def __init__(self, tokens: Tokens | None = None) -> None:
        self._tokens = tokens

    def read(self, body: Body) -> Request:
        tools, left_out = _tools(body.get("tools"))
        instructions = _instructions(body, tools)
        if body.get("background"):
            raise RequestError("Invalid 'background': responses are answered at once.", param="background")
        if body.get("conversation") is not None or body.get("prompt") is not None:
            raise RequestError("Invalid request: 'conversation' and 'prompt' refer to OpenAI's own storage.")
        items(body.get("include") or (), "include")
        parent = _parent(body.get("previous_response_id"))
        messages: Sequence[Message] = _input(body.get("input"))
        said, system = body.get("instructions"), None
        own: list[Message] = [{"role": "system", "content": text_of(said, "instructions")}] if said else []
        if parent is None:
            messages = instructed([*own, *messages], instructions)
        elif named := instructed(own, instructions):
            system = str(named[0]["content"])
        stream = flag(body, "stream")
        turn = TurnRequest(
            messages=messages,
            tools=tools,
            max_tokens=whole(body, "max_output_tokens", 1),
            parent=parent,
            system=system,
            alias=secrets.token_hex(12) if stream else None,
        )
        ignored = without_effect(body, TAKEN, DEFAULTS)
        return Request(turn, str(body.get("model") or ""), body, stream, ignored, left_out)

    def answer(self, request: Request, replies: Sequence[TurnReply]) -> bytes:
        response = _response(request, self._items(request, replies[0]), replies[0])
        return response.model_dump_json(exclude_unset=True).encode()

    def waiting(self, request: Request, waited: int) -> bytes:
        # Codex counts events, not bytes: a comment would not keep it waiting.
        created, in_progress = _beginning(_response(request, []))
        if waited:
            return _event(in_progress, waited + 1)
        return _event(created, 0) + _event(in_progress, 1)

    def events(self, request: Request, replies: Sequence[TurnReply], waited: int = 0) -> Iterator[bytes]:
        items = self._items(request, replies[0])
        beginning = () if waited else _beginning(_response(request, []))
        rest = _sequence(items, _response(request, items, replies[0]))
        for number, emitted in enumerate((*beginning, *rest), waited + 1 if waited else 0):
            yield _event(emitted, number)

    def error(self, error: RequestError) -> bytes:
        return openai_error(error)

    def error_event(self, error: RequestError) -> bytes:
        failed = types.ResponseErrorEvent(
            type="error", code=error.code, message=error.message, param=error.param, sequence_number=0
        )
        return event(failed.model_dump_json().encode(), "error")

    def _items(self, request: Request, reply: TurnReply) -> list[BaseModel]:
        """Return a turn as items of a response."""
        message, node = reply.message, reply.node_id
        cut = reply.end == "length"
        items: list[BaseModel] = []
        if reasoning := message.get("reasoning_content"):
            content = [Content(type="reasoning_text", text=reasoning)]
            items.append(types.ResponseReasoningItem(id=f"rs_{node}", type="reasoning", summary=[], content=content))
        calls = message.get("tool_calls") or ()
        text = message.get("content") or ""
        if text or not calls:
            part = types.ResponseOutputText(
                type="output_text", text=text, annotations=[], logprobs=self._logprobs(request, reply)
            )
            items.append(
                types.ResponseOutputMessage(
                    id=f"msg_{node}",
                    type="message",
                    role="assistant",
                    status="incomplete" if cut else "completed",
                    content=[part],
                )
            )
        for index, call in enumerate(calls):
            items.append(
                types.ResponseFunctionToolCall(
                    id=f"fc_{node}_{index}",
                    type="function_call",
                    call_id=call["id"],
                    name=call["function"]["name"],
                    arguments=call["function"]["arguments"],
                    status="completed",
                )
            )
        return items

    def _logprobs(self, request: Request, reply: TurnReply) -> list[Logprob]:
        included = request.body.get("include") or ()
        if self._tokens is None or "message.output_text.logprobs" not in included:
            return []
        return [Logprob.model_validate(one) for one in token_logprobs(self._tokens, reply)]


def _parent(given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given.startswith(ID):
        raise RequestError(
            f"Previous response with id {short(given)} not found.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return given.removeprefix(ID)


def _input(given: Any) -> list[Message]:
    """Return the input's items as messages.

    Raises:
        RequestError: there is none, or one is no message, reasoning, call or result.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if given is None:
        raise RequestError("Missing required parameter: 'input'.", code="missing_required_parameter", param="input")
    messages: list[Message] = []
    open_turn: dict[str, Any] | None = None
    for index, item in enumerate(items(given, "input")):
        plain, where = plain_message(item), f"input[{index}]"
        if plain is not None and plain["role"] != "assistant":
            messages.append(plain)
            open_turn = None
            continue
        part = {"content": plain["content"]} if plain is not None else _assistant_part(item, where)
        if part is None:
            messages.append(_message(item, where))
            open_turn = None
        elif open_turn is None or ("content" in part and open_turn["content"]):
            open_turn = {"role": "assistant", "content": "", **part}
            messages.append(open_turn)
        else:
            calls = [*open_turn.get("tool_calls", ()), *part.pop("tool_calls", ())]
            open_turn.update(part, **({"tool_calls": calls} if calls else {}))
    if not messages:
        raise RequestError("Invalid 'input': empty array.", code="empty_array", param="input")
    return messages


def _assistant_part(item: Any, where: str) -> dict[str, Any] | None:
    """Return what an item adds to a turn of the assistant; None if the item is none of the assistant's."""
    if not isinstance(item, Mapping):
        raise RequestError(f"Invalid type for '{where}': expected an object.", param=where)
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        return {"content": text_of(item.get("content"), f"{where}.content")}
    if kind == "reasoning":
        parts = records(item.get("content") or (), f"{where}.content")
        text = "".join(str(part.get("text", "")) for _, part in parts)
        return {"reasoning_content": text} if text else {}
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise RequestError(f"Invalid '{where}': a call has a name and arguments.", param=where)
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"id": str(item.get("call_id") or ""), "type": "function", "function": function}]}
    return None


def _message(item: Mapping[str, Any], where: str) -> Message:
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "function_call_output":
        output = text_or_parts(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output}
    if kind != "message" or not isinstance(role, str) or role not in ROLES:
        raise RequestError(
            f"Invalid value: {short(kind if kind != 'message' else role)}. The policy takes messages, reasoning, calls "
            "of functions and their outputs.",
            code="invalid_value",
            param=where,
        )
    read = text_or_parts if role == "user" else text_of
    return {"role": ROLES[role], "content": read(item.get("content"), f"{where}.content")}


def _tools(tools: Any) -> tuple[list[Mapping[str, Any]], Sequence[str]]:
    taken, left_out = functions(tools, "tools")
    return [
        tool(item.get("name"), item.get("description"), item.get("parameters"), where) for where, item in taken
    ], left_out


def _instructions(body: Body, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of the requirements that act through the prompt."""
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    choice = body.get("tool_choice")
    return [*tool_choice(choice, choice, tools), *answer_format(form, form, "text.format")]


def _response(request: Request, items: Sequence[BaseModel], reply: TurnReply | None = None) -> types.Response:
    """Return a response with its items; without a reply, one that is in progress."""
    body = request.body
    alias = request.turn.alias or (reply.node_id if reply is not None else "")
    fields: dict[str, Any] = {
        "id": ID + alias,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "output": list(items),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": _echoed_choice(body.get("tool_choice")),
        "tools": [_echo(one) for one in request.turn.tools],
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions") if isinstance(body.get("instructions"), str) else None,
        "previous_response_id": body.get("previous_response_id"),
        "metadata": {},
    }
    if reply is not None:
        cut = reply.end == "length"
        prompt, drawn = len(reply.prompt_ids), len(reply.token_ids)
        fields |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": IncompleteDetails(reason="max_output_tokens") if cut else None,
            "usage": types.ResponseUsage(
                input_tokens=prompt,
                input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
                output_tokens=drawn,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
                total_tokens=prompt + drawn,
            ),
        }
    return types.Response(**fields)


def _echoed_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        return types.ToolChoiceFunction(type="function", name=choice["name"])
    return choice or "auto"


def _echo(one: Mapping[str, Any]) -> types.FunctionTool:
    function = one["function"]
    return types.FunctionTool(
        type="function",
        name=function["name"],
        description=function.get("description"),
        parameters=dict(function["parameters"]),
        strict=False,
    )


Emitted = tuple[type[BaseModel], dict[str, Any]]


def _event(emitted: Emitted, number: int) -> bytes:
    kind, fields = emitted
    return event(kind(**fields, sequence_number=number).model_dump_json(exclude_unset=True).encode(), fields["type"])


def _beginning(begun: types.Response) -> tuple[Emitted, Emitted]:
    return (
        (types.ResponseCreatedEvent, {"type": "response.created", "response": begun}),
        (types.ResponseInProgressEvent, {"type": "response.in_progress", "response": begun}),
    )


def _sequence(items: Sequence[BaseModel], ended: types.Response) -> Iterator[Emitted]:
    """Yield the events of a stream after its beginning, without their numbers."""
    for index, item in enumerate(items):
        at = {"output_index": index}
        empty = item.model_copy(update={"status": "in_progress", **_emptied(item)})
        yield types.ResponseOutputItemAddedEvent, {"type": "response.output_item.added", "item": empty, **at}
        yield from _item_events(item, {**at, "item_id": getattr(item, "id", "")})
        yield types.ResponseOutputItemDoneEvent, {"type": "response.output_item.done", "item": item, **at}
    if ended.status == "incomplete":
        yield types.ResponseIncompleteEvent, {"type": "response.incomplete", "response": ended}
    else:
        yield types.ResponseCompletedEvent, {"type": "response.completed", "response": ended}


def _emptied(item: BaseModel) -> dict[str, Any]:
    return {"arguments": ""} if isinstance(item, types.ResponseFunctionToolCall) else {"content": []}


def _item_events(item: BaseModel, at: Mapping[str, Any]) -> Iterator[Emitted]:
    if isinstance(item, types.ResponseFunctionToolCall):
        call, arguments = "response.function_call_arguments", item.arguments
        yield types.ResponseFunctionCallArgumentsDeltaEvent, {"type": f"{call}.delta", "delta": arguments, **at}
        named = {"arguments": arguments, "name": item.name}
        yield types.ResponseFunctionCallArgumentsDoneEvent, {"type": f"{call}.done", **named, **at}
    elif isinstance(item, types.ResponseReasoningItem):
        text = item.content[0].text if item.content else ""
        part = {**at, "content_index": 0}
        yield types.ResponseReasoningTextDeltaEvent, {"type": "response.reasoning_text.delta", "delta": text, **part}
        yield types.ResponseReasoningTextDoneEvent, {"type": "response.reasoning_text.done", "text": text, **part}
    elif isinstance(item, types.ResponseOutputMessage):
        content = item.content[0]
        assert isinstance(content, types.ResponseOutputText)
        part = {**at, "content_index": 0}
        probs = [one.model_dump() for one in content.logprobs or ()]
        empty = types.ResponseOutputText(type="output_text", text="", annotations=[], logprobs=[])
        yield types.ResponseContentPartAddedEvent, {"type": "response.content_part.added", "part": empty, **part}
        delta = {"type": "response.output_text.delta", "delta": content.text, "logprobs": probs}
        yield types.ResponseTextDeltaEvent, {**delta, **part}
        done = {"type": "response.output_text.done", "text": content.text, "logprobs": probs}
        yield types.ResponseTextDoneEvent, {**done, **part}
        yield types.ResponseContentPartDoneEvent, {"type": "response.content_part.done", "part": content, **part}
