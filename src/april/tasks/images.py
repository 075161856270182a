"""Images of records: from their forms in data sets to parts of a conversation that name their sources.

A message with images has a list of parts as its content, as chat templates read it: `{"type": "text", "text": ...}`
and `{"type": "image", "image": SOURCE}`. Sources are text (`april.images.source`), so a problem is JSON still.

Images are written into the messages, or stand in a column of their own. Images of a column take the places that the
prompt has for them, in order: parts of type `image` without an image, and the text `<image>`. If there is no place,
they precede the text of the first user message.

Invariant: each image of a record has one place in its prompt, and each place one image.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from april.images.source import KEYS, bytes_of, source_in_data
from april.rollout.trajectory.features import sources_in
from april.tasks.task import Messages

MARK = "<image>"
"""Place of an image in the text of a prompt whose images stand in a column."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record is stored.

    Args:
        folder: directory that paths of images are relative to.
        data: the data set, if images can be stored in it; see `source_in_data`.
        row: number of the record, from 1.
    """

    folder: str
    data: str | None
    row: int

    def source(self, image: Any, path: Sequence[str | int]) -> str:
        """Return the source of an image in its stored form.

        Args:
            path: column of the image, and keys and indices inside it.

        Raises:
            ValueError: the form is unknown.
        """
        if bytes_of(image) is not None and self.data is not None:
            inside = [*path, "bytes"] if isinstance(image, Mapping) else path
            return source_in_data(self.data, self.row, inside)
        if isinstance(image, Mapping):
            known = [(key, image[key]) for key in KEYS if image.get(key)]
            image = known[0][1] if known else image
        if not isinstance(image, str) or not image:
            raise ValueError(
                f"an image in column {path[0]!r} is of type {type(image).__name__}: give the path of a file"
            )
        scheme = image.partition(":")[0]
        if scheme in ("http", "https", "data"):
            raise ValueError(f"an image in column {path[0]!r} begins with {scheme}: save it, and give its path")
        return os.path.join(self.folder, image.removeprefix("file://"))


def located(prompt: Any, path: Sequence[str | int], place: RecordPlace) -> Any:
    """Return a prompt, in any form that a data set has, whose images are named by their sources.

    Content without images becomes text. A prompt that is no list is returned unchanged.

    Raises:
        ValueError: an image has an unknown form, or a part is neither text nor an image.
    """
    if not isinstance(prompt, list):
        return prompt
    messages = []
    for index, message in enumerate(prompt):
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), list):
            parts = [_located(part, (*path, index, "content", i), place) for i, part in enumerate(content)]
            flat = all(part["type"] == "text" for part in parts)
            message = {**message, "content": "".join(part["text"] for part in parts) if flat else parts}
        messages.append(message)
    return messages


def _located(part: Any, path: tuple[str | int, ...], place: RecordPlace) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise ValueError(f"a message of column {path[0]!r} has a part of type {kind!r}: only text and image are read")
    for key in KEYS:
        # Tables have every key in every part, without a value where there is none.
        if part.get(key) is not None:
            return {"type": "image", "image": place.source(part[key], (*path, key))}
    return {"type": "image"}


def column_sources(value: Any, path: Sequence[str | int], place: RecordPlace) -> list[str]:
    """Return the sources of a column with an image, or a list of images; none if it is empty."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [place.source(image, (*path, index)) for index, image in enumerate(value)]
    return [place.source(value, path)]


def with_images(prompt: str | Messages, sources: Sequence[str]) -> str | Messages:
    """Return a prompt with the images of a column in their places.

    Raises:
        ValueError: the prompt has more or fewer places than there are images.
    """
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    open_places = sum(_places(message["content"]) for message in messages)
    if not open_places and sources:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        before: list[dict[str, Any]] = [{"type": "image"} for _ in sources]
        own = {**messages[first], "content": before + _as_parts(messages[first]["content"], marks=False)}
        messages, open_places = [*messages[:first], own, *messages[first + 1 :]], len(sources)
    if open_places != len(sources):
        raise ValueError(f"places for images in its prompt: {open_places}; images in its column: {len(sources)}")
    if not sources:
        return prompt
    remaining = iter(sources)
    return [
        {**message, "content": [_filled(part, remaining) for part in _as_parts(message["content"])]}
        if _places(message["content"])
        else message
        for message in messages
    ]


def _filled(part: dict[str, Any], sources: Iterator[str]) -> dict[str, Any]:
    return {"type": "image", "image": next(sources)} if part == {"type": "image"} else part


def _places(content: str | list[dict[str, Any]]) -> int:
    return sum(part == {"type": "image"} for part in _as_parts(content))


def _as_parts(content: str | list[dict[str, Any]], marks: bool = True) -> list[dict[str, Any]]:
    """Return content as parts; the text `<image>` is a place, if `marks`."""
    if not isinstance(content, str):
        return [each for part in content for each in (_as_parts(part["text"], marks) if "text" in part else [part])]
    texts = content.split(MARK) if marks else [content]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts


def unplaced(prompt: str | Messages) -> int:
    """Return the number of parts of type `image` without an image."""
    return sum(part == {"type": "image"} for part in _parts(prompt))


def image_sources(prompt: str | Messages) -> list[str]:
    """Return the sources of a prompt's images, in order."""
    return [] if isinstance(prompt, str) else sources_in(prompt)


def _parts(prompt: str | Messages) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages whose content is a list."""
    for message in () if isinstance(prompt, str) else prompt:
        if not isinstance(message["content"], str):
            yield from message["content"]
