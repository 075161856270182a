"""Images in the messages of requests.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}                     Chat Completions
    {"type": "input_image", "image_url": "data:image/png;base64,..."}                            Responses
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}    Messages

The core gets `{"type": "image", "image": SOURCE}`, whose source is a file of the run, named by the content's hash: a
request that repeats an image, in a later turn or after a crash, has the same message.

Invariants:
- a program's image is a data URI: neither an address nor a file of april's machine is read for it;
- files are written in threads, before the core sees the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from april.gateway.fields import part_text, short, text_of
from april.gateway.request import Request
from april.gateway.request_errors import RequestError
from april.images.kept import KeptImages
from april.images.source import ImageError
from april.rollout.episodes.environment import Message
from april.rollout.trajectory.features import expanded, sources_in


def text_or_parts(content: Any, param: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: its text or, if it has images, a list of texts and images as data URIs.

    Raises:
        RequestError: a part is neither text nor an image, or an image is no data URI.
    """
    if content is None or isinstance(content, str) or not isinstance(content, Sequence):
        return text_of(content, param)
    parts: list[dict[str, Any]] = []
    for index, given in enumerate(content):
        at = f"{param}[{index}]"
        if (uri := _uri(given, at)) is not None:
            parts.append({"type": "image", "image": uri})
        elif (text := part_text(given, at)) and parts and "text" in parts[-1]:
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + text}
        elif text:
            parts.append({"type": "text", "text": text})
    return parts if any("image" in part for part in parts) else "".join(part["text"] for part in parts)


def _uri(part: Any, param: str) -> str | None:
    """Return the data URI of a part that is an image; None for any other part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image_url", "input_image", "image"):
        return None
    given = part.get("source" if kind == "image" else "image_url")
    if isinstance(given, Mapping) and kind == "image":
        encoded = given.get("type") == "base64"
        given = f"data:{given.get('media_type')};base64,{given.get('data')}" if encoded else given.get("url")
    elif isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, str) and given[:5].lower() == "data:":
        return given
    raise RequestError(
        f"Invalid image at '{param}': expected a data URI in base64 (data:image/png;base64,...), got {short(given)}. "
        "april fetches no addresses, and reads no files for programs.",
        code="invalid_image_url",
        param=param,
    )


class RequestImages:
    """Images of a gateway's requests.

    Args:
        kept: keeps them as files of the run; None: requests have text alone.
    """

    def __init__(self, kept: KeptImages | None) -> None:
        self._kept = kept

    @asynccontextmanager
    async def named(self, request: Request) -> AsyncIterator[Request]:
        """Yield a request whose images are named by their sources; they are held during the block.

        Raises:
            RequestError: the policy takes no images, or one cannot be read.
        """
        messages = request.turn.messages
        if not sources_in(messages):
            yield request
            return
        if self._kept is None:
            raise RequestError("The policy takes text, and no images.", code="invalid_value", param="messages")
        try:
            messages = await asyncio.to_thread(self._kept.received, messages)
        except ImageError as error:
            raise RequestError(f"Invalid image: {error}", code="invalid_image", param="messages") from None
        with self._kept.held(sources_in(messages)):
            yield replace(request, turn=replace(request.turn, messages=messages))

    def count(self, token_ids: Sequence[int], messages: Sequence[Message]) -> int:
        """Return the tokens of rendered messages, with all placeholders of their images.

        Raises:
            RequestError: placeholders and images differ in number.
        """
        try:
            return len(expanded(token_ids, messages, None if self._kept is None else self._kept.images)[0])
        except ValueError as error:
            raise RequestError(f"The messages cannot be encoded: {error}", param="messages") from None
