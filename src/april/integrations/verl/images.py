"""Images of verl's rows: the parts of chat messages that hold them, and the images that verl's own code reads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from april.rollout.trajectory.features import Feature, ranges_of

IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of chat messages that are images."""


class RowImages(list[Any]):
    """The images of a row, in the order of its messages, as verl's dataset class reads them.

    Attributes:
        digests: SHA-256 of each image; see `digest_of`.
        inputs: result of verl's processor for the trainer; None until a response is scored or handed over.
        lock: held while `inputs` is computed.
    """

    def __init__(self, images: Iterable[Any] = ()) -> None:
        super().__init__(images)
        self.digests = tuple(map(digest_of, self))
        self.inputs: Mapping[str, Any] | None = None
        self.lock = threading.Lock()

    def features(
        self, token_ids: Sequence[int], placeholder: int | None, messages: Iterable[Mapping[str, Any]], uid: str
    ) -> tuple[Feature, ...]:
        """Return the images as features of a prompt.

        Args:
            token_ids: the prompt, in which each image has all its placeholders.
            placeholder: token id that stands for an embedding of an image.
            messages: of the row.
            uid: the row in TransferQueue.

        Raises:
            ValueError: ranges of placeholders and images differ in number.
        """
        ranges = list(ranges_of(token_ids, placeholder))
        if len(ranges) != len(self):
            raise ValueError(
                f"data: prompt {uid} has {len(ranges)} ranges of placeholders for {len(self)} images: the chat "
                "template must write one for each, and the text none of its own"
            )
        sources = sources_of(uid, messages)
        return tuple(map(Feature, sources, self.digests, *zip(*ranges, strict=True)))


def digest_of(image: Any) -> str:
    """Return the SHA-256 of an image's mode, size and pixels."""
    found = hashlib.sha256(f"{image.mode} {image.size} ".encode())
    found.update(image.tobytes())
    return found.hexdigest()


def sources_of(uid: str, messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the place of each image: the row of verl's data in TransferQueue, the image's number there, and its path
    if it has one."""
    paths = (part.get("image", part.get("image_url")) for part in image_parts(messages))
    named = (f" ({path})" if isinstance(path, str) and not path.startswith("data:") else "" for path in paths)
    return [f"{uid}/{number}{name}" for number, name in enumerate(named)]


def image_parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of chat messages that are images, in order."""
    for message in messages:
        if isinstance(message.get("content"), list | tuple):
            yield from (part for part in message["content"] if kind_of(part) in IMAGE_PARTS)


def media_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the types of the parts of chat messages that are no text."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [kind for kind in map(kind_of, parts) if kind != "text"]


def kind_of(part: Any) -> str:
    """Return the type of a part of a chat message."""
    # Chat templates take strings as parts, too, and parts without a type, which is then a key of the part.
    if not isinstance(part, Mapping):
        return "text"
    return str(part.get("type") or ("text" if "text" in part else next(iter(part), "text")))
