"""Size of a stored image whose pixels can be decoded, at the least cost.

PNG files are checked by their checksums. JPEG files are decoded in an eighth of their size, which takes half the time:
what is left out is arithmetic that cannot fail. Files of other formats are decoded.
"""

from __future__ import annotations

import io
from typing import Any

from april.images.source import open_image

_ORIENTATION = 0x0112
_QUARTER_TURNS = (5, 6, 7, 8)
"""EXIF orientations in which width and height are exchanged."""


def upright_size(content: bytes, source: str) -> tuple[int, int]:
    """Return width and height of an image as `open_image` returns it.

    Raises:
        ImageError: see `open_image`.
    """
    from PIL import Image

    try:
        image: Any = Image.open(io.BytesIO(content))
        if _whole(image.format, content):
            width, height = image.size
            return (height, width) if _orientation(image, content) in _QUARTER_TURNS else (width, height)
    except Exception:  # each plug-in of Pillow raises its own types; `open_image` names the reason
        pass
    width, height = open_image(content, source).size
    return width, height


def _whole(form: str, content: bytes) -> bool:
    """Whether the pixels of a PNG or JPEG file can be decoded; False for other formats."""
    from PIL import Image

    match form:
        case "PNG":
            return content[-8:-4] == b"IEND" and _checksums_match(content)
        case "JPEG" | "MPO":
            small = Image.open(io.BytesIO(content))
            small.draft(None, (1, 1))  # type: ignore[arg-type]
            small.load()
            return True
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
