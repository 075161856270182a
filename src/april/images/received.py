"""Images of messages as programs and environments give them, as bytes of a file.

An environment gives a PIL image, an array, the bytes or the path of a file, or a data URI; a program sends data URIs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from april.images.image_files import png_of
from april.images.source import KEYS, ImageError, bytes_of
from april.rollout.episodes.environment import Message, TokenIds

SHOWN = 40
"""Characters of a data URI or an address that an error shows."""
LONGEST_PATH = 300
"""Characters of a path that an error shows: a path may be an image that was encoded by mistake."""


def uri_bytes(uri: str) -> bytes:
    """Return the bytes of a data URI in base64.

    Raises:
        ImageError: it is an address, or no data URI in base64.
    """
    head, comma, data = uri.partition(",")
    scheme, _, kind = head.partition(":")
    if scheme.lower() in ("http", "https"):
        raise ImageError(f"image {uri[:SHOWN]}: april fetches no addresses: send the image as a data URI")
    if scheme.lower() != "data" or not comma or not kind.lower().endswith(";base64"):
        raise ImageError(f"image {uri[:SHOWN]!r}: is no data URI in base64 (data:image/png;base64,...)")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"image {uri[:SHOWN]!r}: its base64 cannot be decoded: {error}") from None


def image_bytes(image: Any) -> bytes:
    """Return the bytes of an image that an environment has given.

    Args:
        image: bytes or path of a file, a data URI, a PIL image, or an array of unsigned bytes, [H, W], [H, W, 3] or
            [H, W, 4]. Images in memory become PNG.

    Raises:
        ImageError: the form is unknown, or there is no such file.
    """
    if (stored := bytes_of(image)) is not None:
        return stored
    if isinstance(image, Mapping):
        image = next((image[key] for key in KEYS if image.get(key) is not None), None)
    if isinstance(image, str) and image.partition(":")[0].lower() in ("data", "http", "https"):
        return uri_bytes(image)
    if isinstance(image, str | Path) and str(image):
        return _file_bytes(str(image).removeprefix("file://"))
    from PIL import Image

    if hasattr(image, "__array_interface__") and not isinstance(image, Image.Image):
        try:
            image = Image.fromarray(image)
        except (TypeError, ValueError) as error:
            raise ImageError(f"an array is no image: {error}: give bytes, [H, W], [H, W, 3] or [H, W, 4]") from None
    if not isinstance(image, Image.Image):
        raise ImageError(
            f"an image of a message is a {type(image).__name__}: give a PIL image, an array, bytes, a path, or a data "
            "URI"
        )
    return png_of(image)


def _file_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ImageError(f"image {path[:LONGEST_PATH]}: cannot be read: {reason}") from None


def with_contents(observation: Any) -> Any:
    """Return an observation whose images are bytes; anything but chat messages is returned unchanged.

    Raises:
        ImageError: see `image_bytes`.
    """
    if isinstance(observation, str | TokenIds) or not isinstance(observation, Sequence):
        return observation
    return [_with_contents(message) if isinstance(message, Mapping) else message for message in observation]


def _with_contents(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
        return part
    given = next((part[key] for key in KEYS if part.get(key) is not None), None)
    if given is None:
        raise ImageError("a part of a message has the type image, and no image")
    return {"type": "image", "image": image_bytes(given)}
