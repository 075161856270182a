"""Refusal of a request: a status, a message and a code, which each API writes in its own shape."""

from __future__ import annotations

from http import HTTPStatus


class RequestError(Exception):
    """A request is refused.

    A status is never 429 or 5xx for a reason that a retry would meet again: clients retry those.

    Args:
        message: the fault and its remedy.
        status: HTTP status.
        code: OpenAI's short name of the reason; None if there is none.
        param: name of the request's field.
        anthropic: the message in the words of Anthropic's API, by which its clients recognise the reason.
    """

    def __init__(
        self,
        message: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
        param: str | None = None,
        anthropic: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.anthropic = anthropic
