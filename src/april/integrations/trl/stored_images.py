"""Images of TRL's rows as files: a row that april keeps has the path of a file in the place of each image.

Invariants:
- a file has the pixels of an image that a row had, and is never changed: its name is the SHA-256 of its bytes;
- a row that was stored and loaded equals the original row; only images of a mode that PNG does not have become RGB.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from april.images.image_files import png_of, write_image
from april.images.source import ImageError, open_image, read_image

PATH = "april_image"
"""Key of the object in the place of an image; its value is the path."""


class StoredImages:
    """Args:
    folder: folder for the files, which all processes of the job share. It exists from the first image on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def store(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with paths in the places of its images, whose files are on disk."""
        stored: dict[str, Any] = replaced(row, lambda value: self._write(value) if is_image(value) else None)
        return stored

    def load(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return stored rows with their images; equal images of different rows are one object.

        Raises:
            ImageError: a file is missing or has changed.
        """
        known: dict[str, Any] = {}

        def opened(value: Any) -> Any:
            path = path_of(value)
            if path is not None and path not in known:
                known[path] = _read(path)
            return None if path is None else known[path]

        return [replaced(row, opened) for row in rows]

    def _write(self, image: Any) -> dict[str, str]:
        path = write_image(self._folder, png_of(image), suffix=".png")
        return {PATH: str(path)}


def _read(path: str) -> Any:
    content = read_image(path)
    if hashlib.sha256(content).hexdigest() != Path(path).stem:
        raise ImageError(f"image {path}: has changed since it was stored: put the former file back, or start a new run")
    return open_image(content, path)


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow, which is not imported."""
    module: Any = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def path_of(value: Any) -> str | None:
    """Return the path in the place of a stored image; None for other values."""
    return value[PATH] if isinstance(value, Mapping) and set(value) == {PATH} else None


def replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of nested lists and objects, with the result of `replace` for each value where it is not None."""
    if (other := replace(value)) is not None:
        return other
    if isinstance(value, Mapping):
        return {name: replaced(item, replace) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(item, replace) for item in value]
    return value


def has_images(value: Any) -> bool:
    """Whether nested lists and objects contain an image of Pillow, or a stored one."""
    if isinstance(value, Mapping):
        return path_of(value) is not None or any(map(has_images, value.values()))
    return any(map(has_images, value)) if isinstance(value, list | tuple) else is_image(value)


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the images in the parts of a conversation, in order."""
    contents = [message.get("content") for message in messages]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if part.get("type") == "image" and part.get("image") is not None]
