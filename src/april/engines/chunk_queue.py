"""Chunks on their way from an engine to whoever polls it.

Invariants:
- a chunk comes out once, and chunks come out in the order in which they went in;
- a reader that falls behind makes writers wait, and never loses a chunk;
- while the queue is drained, nobody waits for a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from april.rollout.engine import Chunk


class ChunkQueue:
    """A queue of chunks with one reader, who takes everything at once.

    Args:
        backlog: chunks kept for a slow reader before writers that ask for room have to wait.
    """

    def __init__(self, backlog: int = 4096) -> None:
        self._backlog = backlog
        self._chunks: list[Chunk] = []
        self._arrived = asyncio.Event()
        self._space = asyncio.Event()
        self._space.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._chunks)

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()
        if len(self._chunks) >= self._backlog and not self.draining:
            self._space.clear()

    def take(self) -> list[Chunk]:
        chunks, self._chunks = self._chunks, []
        self._space.set()
        return chunks

    async def ready(self) -> None:
        """Wait for a chunk, or for a `wake`."""
        if not self._chunks:
            self._arrived.clear()
            await self._arrived.wait()

    def wake(self) -> None:
        """Let the reader see that something else has changed."""
        self._arrived.set()

    @property
    def full(self) -> bool:
        return not self._space.is_set()

    async def space(self) -> None:
        """Wait until the reader has caught up."""
        await self._space.wait()

    @contextmanager
    def drain(self) -> Iterator[None]:
        self.draining = True
        self._space.set()
        try:
            yield
        finally:
            self.draining = False
