"""Images that appear during a run: in requests of programs and in observations of environments.

    RUN/images/5c0e...    the bytes of the image with this SHA-256

Invariants:
- an image is on disk, whole, before an event names it: a resumed run finds the images of its journal;
- a file is named by the hash of its content, so equal images have one file and one source, in each turn and after a
  crash. A source does not depend on where the run's directory lies;
- a process that was killed while it wrote leaves a file with a dot in its name, which the next start removes;
- only images that can be decoded are kept: a damaged one is an error of the message, and never of the run;
- threads read, decode and measure images: the event loop gets their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from april.images.image_files import write_image
from april.images.received import with_contents
from april.images.source import FOLDER, KEPT, ImageError, located, open_image
from april.images.store import ImageStore, NoImages
from april.rollout.episodes.environment import Message

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats of Pillow that messages may have. Pillow starts another program for some others, such as EPS."""
MOST_PIXELS = 2**26
"""Pixels of an image: decoded, it takes 200 MB, in several threads at a time."""


class KeptImages:
    """Images that a run keeps as files.

    Args:
        directory: the run's directory.
        images: images of the policy.
    """

    def __init__(self, directory: Path, images: ImageStore | NoImages) -> None:
        self._folder = directory.resolve() / FOLDER
        self.images = images
        for unfinished in self._folder.glob("*.*"):
            unfinished.unlink()

    def keep(self, content: bytes) -> str:
        """Return the source of an image, whose bytes are on disk then. Call it in a thread.

        Raises:
            ImageError: the policy takes no images, or the bytes are no image.
        """
        if isinstance(self.images, NoImages):
            raise ImageError(self.images.reason)
        source = KEPT + write_image(self._folder, content, _check).name
        self.images.measure(source, content)
        return source

    def received(self, observation: Sequence[Message]) -> Sequence[Message]:
        """Return the messages of an observation with their images named by sources.

        Raises:
            ImageError: see `keep`, and `april.images.received.image_bytes`.
        """
        return [_renamed(message, self.keep) for message in with_contents(observation)]

    def with_paths(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages for user code: images that the run keeps are named by the paths of their files."""
        return [_renamed(message, lambda source: located(source, self._folder)) for message in messages]


def _renamed(message: Message, name: Callable[[Any], str]) -> Message:
    """Return a message whose images have the names that `name` gives them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{**part, "image": name(part["image"])} if _is_image(part) else part for part in content]
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _check(content: bytes) -> None:
    open_image(content, "of a message", FORMATS, MOST_PIXELS)
