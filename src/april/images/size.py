"""Size of a stored image, from its header: no pixels are decoded. The checksums of PNG files are compared."""

from __future__ import annotations

import io
from typing import Any

from april.images.source import open_image

_ORIENTATION = 0x0112
_QUARTER_TURNS = (5, 6, 7, 8)
"""EXIF orientations in which width and height are exchanged."""


def upright_size(content: bytes, source: str) -> tuple[int, int]:
    """Return width and height of an image as `open_image` returns it.

    Pixels are decoded only where the header does not suffice: of a file whose end is missing, of a PNG file with a
    wrong checksum, or of a format whose end is not known here.

    Raises:
        ImageError: see `open_image`. Damage in the middle of a file is found in PNG files alone: the other
            files that are not decoded have no checksums.
    """
    from PIL import Image

    try:
        image: Any = Image.open(io.BytesIO(content))
        if _complete(image.format, content):
            width, height = image.size
            return (height, width) if _orientation(image, content) in _QUARTER_TURNS else (width, height)
    except Exception:  # each plug-in of Pillow raises its own types; `open_image` names the reason
        pass
    width, height = open_image(content, source).size
    return width, height


def _complete(form: str, content: bytes) -> bool:
    """Whether a file has its end, and a PNG file right checksums; False for formats other than PNG, JPEG and WebP."""
    match form:
        case "PNG":
            return content[-8:-4] == b"IEND" and _checksums_match(content)
        case "JPEG" | "MPO":
            return content.endswith(b"\xff\xd9")
        case "WEBP":
            return int.from_bytes(content[4:8], "little") + 8 <= len(content)
    return False


def _checksums_match(content: bytes) -> bool:
    from PIL import Image

    try:
        Image.open(io.BytesIO(content)).verify()
    except Exception:  # SyntaxError, and others for lengths that point out of the file
        return False
    return True


def _orientation(image: Any, content: bytes) -> int:
    # Pillow decodes a PNG to look for EXIF data behind its pixels.
    if image.format == "PNG" and not any(mark in content for mark in (b"eXIf", b"Raw profile", b"adobe.xmp")):
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))
