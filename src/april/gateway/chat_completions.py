"""OpenAI's Chat Completions API: `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from april.gateway.fields import flag, functions, items, plain_message, records, short, text_of, texts, tool, whole
from april.gateway.openai_instructions import answer_format, tool_choice
from april.gateway.request import (
    COMMENT,
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
        "messages",
        "model",
        "tools",
        "tool_choice",
        "response_format",
        "n",
        "logprobs",
        "top_logprobs",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "stop",
        "store",
        "metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    ]
)
"""Fields that are read, or that mean nothing for the answer. Any other is logged as one without effect: the sampling
distribution is the recipe's."""
DEFAULTS = {"parallel_tool_calls": True, "modalities": ["text"]}
MOST_CHOICES = 128
"""Largest `n`, as in OpenAI's API."""
ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool", "function": "tool"}


class ChatCompletions:
    """Chat Completions API.

    Args:
        tokens: text of tokens, for `logprobs`.
    """

    def __init__(self, tokens: Tokens | None = None) -> None:
        self._tokens = tokens

    def read(self, body: Body) -> Request:
        tools, left_out = read_tools(body.get("tools"))
        instructions = _instructions(body, tools)
        n = whole(body, "n", 1) or 1
        if n > MOST_CHOICES:
            raise RequestError(f"Invalid 'n': expected at most {MOST_CHOICES}.", param="n")
        if whole(body, "top_logprobs", 0):
            raise RequestError(
                "Invalid 'top_logprobs': the policy returns the log-probability of the drawn token only.",
                param="top_logprobs",
            )
        if flag(body, "logprobs") and self._tokens is None:
            raise RequestError("Invalid 'logprobs': this gateway has no tokenizer.", param="logprobs")
        turn = TurnRequest(
            messages=instructed(read_messages(body.get("messages")), instructions),
            tools=tools,
            max_tokens=whole(body, "max_completion_tokens", 1) or whole(body, "max_tokens", 1),
            n=n,
            stop=texts(body, "stop"),
        )
        ignored = without_effect(body, TAKEN, DEFAULTS)
        return Request(turn, str(body.get("model") or ""), body, flag(body, "stream"), ignored, left_out)

    def answer(self, request: Request, replies: Sequence[TurnReply]) -> bytes:
        completion = ChatCompletion.model_validate(
            {
                "id": f"chatcmpl-{replies[0].node_id}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.model,
                "choices": [
                    {
                        "index": index,
                        "message": _answer_message(reply.message),
                        "logprobs": self._logprobs(request, reply),
                        "finish_reason": finish_reason(reply),
                    }
                    for index, reply in enumerate(replies)
                ],
                "usage": _usage(replies),
            }
        )
        return completion.model_dump_json(exclude_unset=True).encode()

    def waiting(self, request: Request, waited: int) -> bytes:
        return COMMENT

    def events(self, request: Request, replies: Sequence[TurnReply], waited: int = 0) -> Iterator[bytes]:
        head = {
            "id": f"chatcmpl-{replies[0].node_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        options = request.body.get("stream_options")
        counted = isinstance(options, Mapping) and bool(options.get("include_usage"))
        usage = {"usage": None} if counted else {}
        for index, reply in enumerate(replies):
            logprobs = self._logprobs(request, reply)
            for delta in _deltas(reply.message):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                if logprobs is not None and "role" not in delta:
                    choice["logprobs"], logprobs = logprobs, None
                yield _chunk({**head, "choices": [choice], **usage})
            last = {"index": index, "delta": {}, "logprobs": logprobs, "finish_reason": finish_reason(reply)}
            yield _chunk({**head, "choices": [last], **usage})
        if counted:
            yield _chunk({**head, "choices": [], "usage": _usage(replies)})
        yield event(b"[DONE]")

    def error(self, error: RequestError) -> bytes:
        return openai_error(error)

    def error_event(self, error: RequestError) -> bytes:
        return event(openai_error(error))

    def _logprobs(self, request: Request, reply: TurnReply) -> dict[str, Any] | None:
        if self._tokens is None or not request.body.get("logprobs"):
            return None
        return {"content": token_logprobs(self._tokens, reply)}


def read_messages(messages: Any) -> Sequence[Message]:
    """Return the messages in the form that the core compares and renders.

    Raises:
        RequestError: there is none, or one is no message.
    """
    if messages is None:
        raise RequestError(
            "Missing required parameter: 'messages'.", code="missing_required_parameter", param="messages"
        )
    read = [
        plain_message(item) or _message(item, f"messages[{index}]")
        for index, item in enumerate(items(messages, "messages"))
    ]
    if not read:
        raise RequestError(
            "Invalid 'messages': empty array. Expected an array with minimum length 1.",
            code="empty_array",
            param="messages",
        )
    return read


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise RequestError(f"Invalid type for '{where}': expected an object.", param=where)
    role = item.get("role")
    if role == "assistant":
        return _assistant(item, where)
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(
            f"Invalid value: {short(role)}. Supported values are: 'system', 'assistant', 'user', 'tool', and "
            "'developer'.",
            code="invalid_value",
            param=f"{where}.role",
        )
    if ROLES[role] == "system":
        return {"role": "system", "content": text_of(item.get("content"), f"{where}.content")}
    content = text_or_parts(item.get("content"), f"{where}.content")
    if role == "user":
        return {"role": "user", "content": content}
    names = {key: str(item[key]) for key in ("tool_call_id", "name") if item.get(key) is not None}
    return {"role": "tool", **names, "content": content}


def _assistant(item: Mapping[str, Any], where: str) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text_of(item.get("content"), f"{where}.content")}
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = [_call(call, at) for at, call in records(item.get("tool_calls") or [], f"{where}.tool_calls")]
    return {**message, "tool_calls": calls} if calls else message


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"Invalid '{where}': expected a call of a function.", param=where)
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": written},
    }


def read_tools(tools: Any) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]]:
    """Return the functions, and the types of other tools."""
    read = []
    taken, left_out = functions(tools, "tools")
    for where, item in taken:
        function = item.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"Missing required parameter: '{where}.function'.", param=where)
        read.append(tool(function.get("name"), function.get("description"), function.get("parameters"), where))
    return read, left_out


def _instructions(body: Body, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of the requirements that act through the prompt."""
    choice, form = body.get("tool_choice"), body.get("response_format")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    described = form.get("json_schema") if isinstance(form, Mapping) else None
    return [*tool_choice(choice, function, tools), *answer_format(form, described, "response_format")]


def finish_reason(reply: TurnReply) -> str:
    if reply.end == "length":
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def _answer_message(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content")
    return {
        "role": "assistant",
        "content": message.get("content") or (None if calls else ""),
        "refusal": None,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": reasoning} if reasoning else {}),
    }


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": "", "refusal": None}
    if reasoning := message.get("reasoning_content"):
        yield {"reasoning_content": reasoning}
    if content := message.get("content"):
        yield {"content": content}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        begun = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": begun}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}


def _chunk(fields: Mapping[str, Any]) -> bytes:
    return event(ChatCompletionChunk.model_validate(fields).model_dump_json(exclude_unset=True).encode())


def _usage(replies: Sequence[TurnReply]) -> dict[str, Any]:
    prompt = len(replies[0].prompt_ids)
    drawn = sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def token_logprobs(tokens: Tokens, reply: TurnReply) -> list[dict[str, Any]]:
    """Return each drawn token with its log-probability, in the form of OpenAI's APIs."""
    pieces = tokens.pieces(reply.token_ids)
    return [
        {
            "token": piece.decode(errors="replace"),
            "bytes": list(piece),
            "logprob": float(logprob),
            "top_logprobs": [],
        }
        for piece, logprob in zip(pieces, reply.logprobs, strict=True)
    ]


def openai_error(error: RequestError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": fields}, ensure_ascii=False).encode()
