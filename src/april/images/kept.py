"""Images that appear during a run: in requests of programs and in observations of environments.

    RUN/images/5c0e...    the bytes of the image with this SHA-256

Invariants:
- an image is on disk, whole, before an event names it: a resumed run finds the images of its journal;
- a file is named by the hash of its content, so equal images have one file and one source, in each turn and after a
  crash. A source does not depend on where the run's directory lies;
- a process that was killed while it wrote leaves a file with a dot in its name, which the next start removes;
- only images that can be decoded are kept: a damaged one is an error of the message, and never of the run;
- an image is deleted only if no checkpoint and no event of the journal names it, and none that is still to be written
  can: it was not kept since the deletion before, and no request that waits has it;
- threads read, decode and measure images: the event loop gets their sources.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from april.images.image_files import write_image
from april.images.received import with_contents
from april.images.source import KEPT, ImageError, kept_folder, located, open_image
from april.images.store import ImageStore, NoImages
from april.rollout.episodes.environment import Message

log = logging.getLogger(__name__)

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats of Pillow that messages may have. Pillow starts another program for some others, such as EPS."""
MOST_PIXELS = 2**26
"""Pixels of an image: decoded, it takes 200 MB, in several threads at a time."""


WINDOW = 1 << 20
"""Bytes that are searched for names of images at a time: other threads run in between."""
NAMED = re.compile(KEPT.encode() + rb"([0-9a-f]{64})")


class KeptImages:
    """Images that a run keeps as files.

    Args:
        directory: the run's directory.
        images: images of the policy.
    """

    def __init__(self, directory: Path, images: ImageStore | NoImages) -> None:
        self._folder = kept_folder(directory)
        self.images = images
        self._lock = threading.Lock()
        self._held = Counter[str]()
        """Images of requests that wait, by their hash."""
        self._recent: set[str] = set()
        """Images that were kept, or held, since the latest call of `prune` began."""
        self._earlier: set[str] = set()
        """The same between the two latest calls."""
        for unfinished in self._folder.glob("*.*"):
            unfinished.unlink()

    def keep(self, content: bytes) -> str:
        """Return the source of an image, whose bytes are on disk then. Call it in a thread.

        Raises:
            ImageError: the policy takes no images, or the bytes are no image.
        """
        if isinstance(self.images, NoImages):
            raise ImageError(self.images.reason)
        digest = hashlib.sha256(content).hexdigest()
        with self._lock:  # before the file is looked for, which `prune` may be about to delete
            self._recent.add(digest)
        write_image(self._folder, content, _check)
        self.images.measure(KEPT + digest, content)
        return KEPT + digest

    def received(self, observation: Sequence[Message]) -> Sequence[Message]:
        """Return the messages of an observation with their images named by sources.

        Raises:
            ImageError: see `keep`, and `april.images.received.image_bytes`.
        """
        return [_renamed(message, self.keep) for message in with_contents(observation)]

    def with_paths(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages for user code: images that the run keeps are named by the paths of their files."""
        return [_renamed(message, lambda source: located(source, self._folder)) for message in messages]

    @contextmanager
    def held(self, sources: Iterable[str]) -> Iterator[None]:
        """Keep images during the block, and until the second call of `prune` after it."""
        digests = [source.removeprefix(KEPT) for source in sources]
        with self._lock:
            self._held.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._held -= Counter(digests)
                self._recent.update(digests)

    def prune(self, files: Iterable[Path]) -> None:
        """Delete images that are not needed any more. It reads the files once, so call it in a thread.

        Args:
            files: checkpoints and the journal, which contain each event that was recorded before the call.
        """
        with self._lock:
            self._earlier, self._recent = self._recent, set()
        try:
            if kept := [path for path in self._folder.glob("*") if not path.suffix]:
                named = {digest for file in files for digest in _named_in(file)}
                for path in kept:
                    self._delete_unless_used(path, named)
        except OSError as error:  # costs room, and no image that is needed
            log.warning("%s: images of former episodes cannot be deleted: %s", self._folder, error)

    def _delete_unless_used(self, path: Path, named: Set[str]) -> None:
        with self._lock:
            if not any(path.name in used for used in (named, self._recent, self._earlier, self._held)):
                path.unlink(missing_ok=True)


def _named_in(file: Path) -> Iterator[str]:
    """Yield the hashes of the images that a file names."""
    with file.open("rb") as content:
        before = b""
        while block := content.read(WINDOW):
            searched = before + block
            yield from (digest.decode() for digest in NAMED.findall(searched))
            before = searched[-(len(KEPT) + 63) :]  # a name may begin in this window and end in the next


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
