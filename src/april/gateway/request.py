"""A request of a program, and the protocol of the APIs that read it and write its answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from april.gateway.request_errors import RequestError
from april.rollout.episodes.environment import Message
from april.rollout.episodes.turns import TurnReply, TurnRequest

Body = Mapping[str, Any]
COMMENT = b": keep-alive\n\n"
"""Comment in a stream of server-sent events."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of any API.

    Attributes:
        turn: the request as the core gets it.
        model: name of the model that the client asked for.
        body: the request's fields.
        stream: whether the client wants events.
        ignored: names of settings of the request that have no effect.
        left_out: types of tools that the policy is not offered.
    """

    turn: TurnRequest
    model: str
    body: Body
    stream: bool = False
    ignored: Sequence[str] = ()
    left_out: Sequence[str] = ()


class API(Protocol):
    """One model API: reads requests, writes answers, events and errors."""

    def read(self, body: Body) -> Request:
        """Return the request.

        Raises:
            RequestError: the body is no request of this API.
        """
        ...

    def answer(self, request: Request, replies: Sequence[TurnReply]) -> bytes:
        """Return the response's body."""
        ...

    def waiting(self, request: Request, waited: int) -> bytes:
        """Return the bytes that keep a stream's client waiting.

        Args:
            waited: how often that has happened for this request.
        """
        ...

    def events(self, request: Request, replies: Sequence[TurnReply], waited: int = 0) -> Iterator[bytes]:
        """Yield the response as server-sent events, or the rest of them after `waiting`."""
        ...

    def error(self, error: RequestError) -> bytes:
        """Return the error's body."""
        ...

    def error_event(self, error: RequestError) -> bytes:
        """Return the error as a server-sent event."""
        ...


def without_effect(body: Body, taken: Collection[str], defaults: Mapping[str, Any]) -> list[str]:
    """Return the names of a body's fields that have no effect.

    Args:
        taken: fields that are read, or that mean nothing for the answer.
        defaults: values that describe what the policy does anyway.
    """
    return [
        name
        for name, value in body.items()
        if name not in taken and value is not None and not (name in defaults and value == defaults[name])
    ]


class Tokens(Protocol):
    """Text of single tokens."""

    def pieces(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Return the bytes of each token."""
        ...


def instructed(messages: Sequence[Message], instructions: Sequence[str]) -> Sequence[Message]:
    """Return the messages with instructions at the end of the first system message.

    A forced `tool_choice` and a schema for the answer act through the prompt only. The place is the same in every
    request of a conversation, so that a later request extends the earlier one.
    """
    if not instructions:
        return messages
    text = "\n\n".join(instructions)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def choice_instruction(kind: str | None, name: str | None = None) -> list[str]:
    """Return the text of a `tool_choice`: "auto", "none", "required", or one function's name."""
    if kind == "none":
        return ["Do not call a tool in your next turn."]
    if name is not None:
        return [f"Call the tool {name} in your next turn."]
    return ["Call a tool in your next turn."] if kind == "required" else []


def schema_instruction(schema: Any) -> list[str]:
    """Return the text of a schema for the answer; None stands for any JSON object."""
    if schema is None:
        return ["Answer with one JSON object and nothing else."]
    written = json.dumps(schema, ensure_ascii=False)
    return [f"Answer with one JSON value and nothing else. It must match this JSON schema: {written}"]


def event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
