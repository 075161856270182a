"""Images that appear during a run: in requests of programs and in observations of environments.

    RUN/images/5c0e...    the bytes of the image with this SHA-256

Invariants:
- an image is on disk, whole, before an event names it: a resumed run finds the images of its journal;
- a file is named by the hash of its content, so equal images have one file and one source, in each turn and after a
  crash;
- a process that was killed while it wrote leaves a file with a dot in its name, which the next start removes;
- only images that can be decoded are kept: a damaged one is an error of the message, and never of the run;
- threads read, decode and measure images: the event loop gets their sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from april.images.image_files import write_image
from april.images.received import with_contents
from april.images.source import ImageError, open_image
from april.images.store import ImageStore, NoImages
from april.rollout.episodes.environment import Message

FOLDER = "images"
"""Folder of a run's directory."""
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
        source = str(write_image(self._folder, content, _check))
        self.images.measure(source, content)
        return source

    def received(self, observation: Sequence[Message]) -> Sequence[Message]:
        """Return the messages of an observation with their images named by sources.

        Raises:
            ImageError: see `keep`, and `april.images.received.content_of`.
        """
        return [self._named(message) for message in with_contents(observation)]

    def _named(self, message: Message) -> Message:
        content = message.get("content")
        return {**message, "content": [self._part(part) for part in content]} if isinstance(content, list) else message

    def _part(self, part: Any) -> Any:
        is_image = isinstance(part, Mapping) and part.get("type") == "image"
        return {**part, "image": self.keep(part["image"])} if is_image else part


def _check(content: bytes) -> None:
    open_image(content, "of a message", FORMATS, MOST_PIXELS)
