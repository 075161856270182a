"""Images as files that are named by the SHA-256 of their bytes.

Invariants:
- a file is whole and on disk when its path is returned, and is never changed;
- threads and processes may write the same image at the same time: each writes a file of its own and renames it.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.disk import sync_directory, sync_file

PNG_MODES = ("1", "L", "LA", "P", "I;16", "RGB", "RGBA")
"""Modes of Pillow that PNG stores without loss."""


def png_of(image: Any) -> bytes:
    """Return a PIL image as PNG; one of a mode that PNG does not have becomes RGB."""
    content = io.BytesIO()
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(content, "PNG", compress_level=1)
    return content.getvalue()


def write_image(folder: Path, content: bytes, check: Callable[[bytes], None] | None = None, suffix: str = "") -> Path:
    """Write a file with this content unless there is one, and return its path.

    Args:
        folder: made if it does not exist.
        check: called before the file is written, to raise an error.
        suffix: end of the file's name.
    """
    path = folder / f"{hashlib.sha256(content).hexdigest()}{suffix}"
    if path.exists() and path.stat().st_size == len(content):
        return path
    if check is not None:
        check(content)
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_directory(folder.parent)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    fresh.write_bytes(content)
    sync_file(fresh)
    fresh.replace(path)
    sync_directory(folder)
    return path
