"""Images of one run: their placeholders, and the pixels that a model computes them from.

Every process that encodes prompts or computes with the model has a store of its own. Prompts are encoded from the size
and the hash of an image, which is checked for damage then. transformers' image processor makes its pixels only when a
model needs them.

Invariants:
- an image is used only if its bytes have the hash that they had when its prompt was encoded;
- the placeholders of an image in its prompt are equal in number to the embeddings that the model makes of it;
- at most `CACHED_BYTES` of pixels are kept, and the image that was used last; hashes and sizes of `KNOWN` images;
- the store's lock is not held while an image is read or processed, and threads that need the same image process it
  once.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april.images.picture import picture_of
from april.images.size import upright_size
from april.images.source import ImageError, located, open_image, read_image
from april.rollout.trajectory.features import Feature

CACHED_BYTES = 256 << 20
"""Pixels that a store keeps."""
KNOWN = 1 << 17
"""Images whose hash and size a store remembers, in about 0.5 kB each: more than are read before training."""


class Pixels(NamedTuple):
    """An image as the model's input.

    Args:
        patches: pixels of each patch, [patches, values].
        grid: patches in time, height and width.
        placeholders: embeddings that the model makes of the image.
    """

    patches: NDArray[np.float32]
    grid: tuple[int, int, int]
    placeholders: int


class Measured(NamedTuple):
    """An image in a prompt.

    Args:
        digest: SHA-256 of its bytes, in hexadecimal digits.
        placeholders: embeddings that the model makes of it.
    """

    digest: str
    placeholders: int


@dataclass(frozen=True, slots=True)
class NoImages:
    """The images of a policy or an engine that takes none."""

    reason: str

    @property
    def placeholder(self) -> None:
        """See `PromptImages`."""

    def read_ahead(self, sources: Iterable[str]) -> None:
        """See `PromptImages`."""

    def expand(self, token_ids: Sequence[int], sources: Sequence[str]) -> tuple[list[int], tuple[Feature, ...]]:
        raise ImageError(f"it has {_counted(len(sources), 'image')}, but {self.reason}")


class ImageStore:
    """Images for a model of the Qwen-VL family.

    Args:
        processor: transformers' image processor of the model.
        placeholder: token id that stands for an embedding of an image.
        undrawn: token ids that a policy may not sample.
        media: token ids that stand for embeddings of images and of other media.
        begin: token id behind which an image begins; None if the model has none.
        kept: folder of the images that the run keeps; None: it keeps none.
    """

    def __init__(
        self,
        processor: Any,
        placeholder: int,
        undrawn: Sequence[int] = (),
        media: Sequence[int] = (),
        begin: int | None = None,
        kept: Path | None = None,
    ) -> None:
        self.placeholder = placeholder
        self.undrawn = tuple(undrawn)
        self.media = {placeholder, *media}
        self.begin = begin
        self.kept = kept
        self._processor = processor
        self._merged = int(processor.merge_size) ** 2
        self._measured: dict[str, Measured] = {}
        self._pixels: OrderedDict[str, Pixels] = OrderedDict()
        self._grids: dict[str, tuple[int, int, int]] = {}
        self._bytes = 0
        self._pending: dict[tuple[str, str], Future[Pixels]] = {}
        """Images that a thread reads now, by source and hash."""
        # The trainer's thread, the event loop and threads of `fetch` share a store.
        self._lock = threading.Lock()

    @property
    def largest(self) -> int | None:
        """Placeholders of the largest image that the processor makes; None if images keep their size."""
        size = self._processor.size.get("longest_edge") if self._processor.do_resize else None
        return None if size is None else int(size) // int(self._processor.patch_size) ** 2 // self._merged

    @property
    def used(self) -> bool:
        """Whether a prompt with images was encoded."""
        return bool(self._measured)

    def read_ahead(self, sources: Iterable[str]) -> None:
        """See `PromptImages`."""
        if len(unknown := [source for source in dict.fromkeys(sources) if source not in self._measured]) > 1:
            with ThreadPoolExecutor(thread_name_prefix="images") as threads:
                for measured in [threads.submit(self.measure, source) for source in unknown]:
                    with suppress(ImageError):  # `expand` raises it again
                        measured.result()

    def expand(self, token_ids: Sequence[int], sources: Sequence[str]) -> tuple[list[int], tuple[Feature, ...]]:
        """See `PromptImages`."""
        found = sum(token == self.placeholder for token in token_ids)
        if found != len(sources):
            raise ImageError(
                f"its text has {_counted(found, 'placeholder')} for {_counted(len(sources), 'image')}: the chat "
                "template must write one for each, and the text none of its own"
            )
        ids: list[int] = []
        features: list[Feature] = []
        for token in token_ids:
            count = 1
            if token == self.placeholder:
                source = sources[len(features)]
                if features and features[-1].end == len(ids):
                    raise ImageError(
                        f"image {source}: its placeholder follows another image's at once: the chat template must "
                        "write a token between two images"
                    )
                digest, count = self.measure(source)
                features.append(Feature(source, digest, len(ids), count))
            ids += [token] * count
        return ids, tuple(features)

    def pixels(self, feature: Feature) -> Pixels:
        """Return the pixels of a prompt's image.

        Raises:
            ImageError: it is missing, cannot be read, or is not the image that the prompt was encoded with.
        """
        key = feature.source, feature.digest
        with self._lock:
            if (known := self._pixels.get(feature.digest)) is not None:
                assert known.placeholders == feature.length, f"image {feature.source}: other placeholders"
                self._pixels.move_to_end(feature.digest)
                return known
            if (pending := self._pending.get(key)) is None:
                own = self._pending[key] = Future[Pixels]()
        if pending is not None:
            return pending.result()
        try:
            made = self._read(feature)
        except BaseException as error:
            with self._lock:
                del self._pending[key]
            own.set_exception(error)
            raise
        with self._lock:
            self._keep(feature.digest, made)
            del self._pending[key]
        own.set_result(made)
        return made

    def picture(self, feature: Feature) -> NDArray[np.uint8]:
        """Return a prompt's image as the processor resized it, [height, width, 3].

        Raises:
            ImageError: see `pixels`, or the processor does not compute with colours of 0 to 255.
        """
        pixels = self.pixels(feature)
        try:
            return picture_of(pixels.patches, pixels.grid, self._processor)
        except ValueError as error:
            name = type(self._processor).__name__
            raise ImageError(f"image {feature.source}: {error}, by the image processor {name}") from None

    async def fetch(self, features: Iterable[Feature]) -> list[Pixels]:
        """Return the pixels of images, which threads read and process: the event loop continues.

        Raises:
            ImageError: see `pixels`.
        """
        return await asyncio.gather(*(self._fetched(feature) for feature in features))

    async def _fetched(self, feature: Feature) -> Pixels:
        if feature.digest in self._pixels:
            return self.pixels(feature)
        return await asyncio.to_thread(self.pixels, feature)

    def grid(self, feature: Feature) -> tuple[int, int, int]:
        """Return the patches of a prompt's image in time, height and width; see `pixels`."""
        return self._grids.get(feature.digest) or self.pixels(feature).grid

    def knows_grid(self, feature: Feature) -> bool:
        """Whether `grid` returns without processing the image."""
        return feature.digest in self._grids

    def _read(self, feature: Feature) -> Pixels:
        source = located(feature.source, self.kept)
        content = read_image(source)
        if hashlib.sha256(content).hexdigest() != feature.digest:
            raise ImageError(
                f"image {source}: has changed since its prompt was encoded: put the former image back, or "
                "start a new run"
            )
        try:
            image = open_image(content, source)
        except ImageError as error:
            raise ImageError(f"{error}: start a new run without it, or with another image in its place") from None
        made = self._processed(image, source)
        if made.placeholders != feature.length:
            raise ImageError(
                f"image {source}: {made.placeholders} embeddings, but its prompt has "
                f"{_counted(feature.length, 'placeholder')}: the image processor has changed"
            )
        return made

    def _keep(self, digest: str, made: Pixels) -> None:
        if digest in self._pixels:  # another file with the same bytes was processed first
            return
        self._pixels[digest] = made
        _remember(self._grids, digest, made.grid)
        self._bytes += made.patches.nbytes
        while self._bytes > CACHED_BYTES and len(self._pixels) > 1:
            _, dropped = self._pixels.popitem(last=False)
            self._bytes -= dropped.patches.nbytes

    def measure(self, source: str, content: bytes | None = None) -> Measured:
        """Return what `expand` needs to know of an image, which is then remembered.

        Args:
            content: bytes of the image; None: they are read.

        Raises:
            ImageError: the image cannot be read, or the processor takes none of this shape.
        """
        if (known := self._measured.get(source)) is not None:
            return known
        place = located(source, self.kept)
        content = read_image(place) if content is None else content
        width, height = upright_size(content, place)
        try:
            patches = int(self._processor.get_number_of_image_patches(height, width))
        except ValueError as error:
            raise ImageError(f"image {place}: {error}") from None
        measured = Measured(hashlib.sha256(content).hexdigest(), patches // self._merged)
        with self._lock:
            _remember(self._measured, source, measured)
        return measured

    def _processed(self, image: Any, source: str) -> Pixels:
        try:
            made = self._processor(images=[image], return_tensors="pt")
        except (ValueError, TypeError) as error:
            raise ImageError(f"image {source}: {' '.join(str(error).split())}") from None
        [grid] = made["image_grid_thw"].tolist()
        return Pixels(made["pixel_values"].float().numpy(), tuple(grid), int(np.prod(grid)) // self._merged)


def _remember(known: dict[str, Any], key: str, value: Any) -> None:
    known[key] = value
    if len(known) > KNOWN:
        del known[next(iter(known))]


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'s' * (count != 1)}"
