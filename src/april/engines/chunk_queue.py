"""Queue of chunks between an engine and its consumer.

Invariants:
- every chunk leaves the queue once, in the order of arrival; a sample that is taken by name overtakes other samples;
- a reader that falls behind makes writers wait, and never loses a chunk;
- in a `drain` block no writer waits for the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator
from contextlib import contextmanager

from april.rollout.engine import Chunk


class ChunkQueue:
    """A queue of chunks with one reader, who takes everything at once, or everything of some samples.

    Args:
        backlog: chunks kept for a slow reader before writers have to wait for `space`.

    Attributes:
        full: writers have to wait for `space`.
    """

    def __init__(self, backlog: int = 4096) -> None:
        self._backlog = backlog
        self._chunks: list[Chunk] = []
        self._arrived = asyncio.Event()
        self._space = asyncio.Event()
        self._draining = 0
        self._look()

    def __len__(self) -> int:
        return len(self._chunks)

    def put(self, chunk: Chunk) -> None:
        # Called for every chunk, so the event is set for the first one only, and `_look` is called only near the limit.
        chunks = self._chunks
        if not chunks:
            self._arrived.set()
        chunks.append(chunk)
        if len(chunks) >= self._backlog:
            self._look()

    def take(self, sample_ids: Container[str] | None = None) -> list[Chunk]:
        """Remove and return the queued chunks of the named samples, or of all samples."""
        taken, left = parted(self._chunks, sample_ids)
        self._chunks = left
        self._look()
        return taken

    async def ready(self) -> None:
        """Wait for a chunk, or for a `wake`."""
        if not self._chunks:
            self._arrived.clear()
            await self._arrived.wait()

    def wake(self) -> None:
        """Wake the reader without a chunk."""
        self._arrived.set()

    def _look(self) -> None:
        """Update whether writers have to wait."""
        self.full = len(self._chunks) >= self._backlog and not self._draining
        if self.full:
            self._space.clear()
        else:
            self._space.set()

    async def space(self) -> None:
        """Wait until the reader has caught up."""
        await self._space.wait()

    @contextmanager
    def drain(self) -> Iterator[None]:
        # A counter, not a flag: an engine may be abandoned while an interrupt of it still drains.
        self._draining += 1
        self._look()
        try:
            yield
        finally:
            self._draining -= 1
            self._look()


def parted(chunks: list[Chunk], sample_ids: Container[str] | None) -> tuple[list[Chunk], list[Chunk]]:
    """Split chunks into the chunks of the named samples (all chunks without names) and the rest."""
    if sample_ids is None:
        return chunks, []
    named = [chunk for chunk in chunks if chunk.sample_id in sample_ids]
    return named, [chunk for chunk in chunks if chunk.sample_id not in sample_ids] if len(named) < len(chunks) else []
