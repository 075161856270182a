"""The trainer's half of an embedded engine that works elsewhere: in another process, on another machine.

Both halves exchange messages, each way in order: `submit`, `forget` and numbered calls go out, chunks and answers come
back (`host.py` is the other half).

Invariants:
- what the other half sampled and sent is handed out exactly once, also if it dies;
- nobody waits for ever: another half that hangs, and one that is gone, end every wait for it with an `EngineError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from april.engines.calls import Calls
from april.engines.chunk_queue import ChunkQueue
from april.engines.packed import unpack
from april.rollout.engine import Capacity, Chunk, EngineError
from april.rollout.trajectory import Sample

LOADING = 1800.0
"""Seconds that the other half may take to load the model, or new weights."""


class Wire(Protocol):
    """What takes messages to the other half."""

    def send(self, message: Any) -> None: ...

    def close(self) -> object: ...


class RemoteEngine:
    """The base of engines whose work is done elsewhere; `_link` leads there.

    Attributes:
        patience: seconds that a forward pass may take. Another half that says nothing for twice as long hangs.
    """

    patience = 120.0

    def __init__(self) -> None:
        self.capacity = Capacity(0, 0)
        self.version = 0
        self.running = 0
        self._link: Wire
        self._queue = ChunkQueue()
        self._in_flight: set[str] = set()
        self._calls = Calls(lambda message: self._link.send(message), self._hung)
        self._down: str | None = None

    def submit(self, sample: Sample) -> None:
        context = self.capacity.context_length
        if len(sample.prompt_ids) >= context:
            raise ValueError(
                f"sample {sample.id}: a prompt of {len(sample.prompt_ids)} tokens leaves no room for a response in a "
                f"context of {context} tokens; shorten it or raise context_length"
            )
        self._in_flight.add(sample.id)
        if self._down is None:
            self._link.send(("submit", sample))

    async def poll(self) -> list[Chunk]:
        while self._in_flight and not self._queue:
            if self._down is not None:
                raise EngineError(self._down)
            try:
                async with asyncio.timeout(self.patience):
                    await self._queue.ready()
            except TimeoutError:
                await self._call("answer")
        return self._take()

    def _take(self, names: set[str] | None = None) -> list[Chunk]:
        chunks = self._queue.take(names)
        self._in_flight -= {chunk.sample_id for chunk in chunks if chunk.finish or chunk.error is not None}
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        names = None if sample_ids is None else set(sample_ids)
        if self._down is None and self._in_flight and (names is None or names & self._in_flight):
            await self._call("interrupt", names)
        chunks = self._take(names)
        self._in_flight -= self._in_flight.copy() if names is None else names
        self._queue.wake()
        return chunks

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Go over to policy `version`, whose tensors are where `weights` says, in a form that the engine documents."""
        if self._in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        await self._call("update", version, self._sent(weights), limit=LOADING)
        self.version = version

    def _sent(self, weights: Any) -> Any:
        """What the other half is told about `weights`.

        Raises:
            ValueError: there are no weights there.
        """
        raise NotImplementedError

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        if self._down is None:
            self._link.send(("forget", None if sample_ids is None else list(sample_ids)))

    async def _call(self, what: str, *arguments: Any, limit: float | None = None) -> Any:
        if self._down is not None:
            raise EngineError(self._down)
        return await self._calls.call(what, *arguments, limit=limit or self.patience)

    def _received(self, message: Any) -> None:
        match message:
            case "chunks", packed, running:
                self.running = running
                for chunk in unpack(packed):
                    if chunk.sample_id in self._in_flight:
                        self._queue.put(chunk)
            case "done", number, error, value:
                self._calls.answered(number, error, value)
            case "failed", reason:
                self._lost(reason)

    def _lost(self, reason: str) -> None:
        """The other half is gone: nothing comes any more beside what has come."""
        self._down = self._down or reason
        self._calls.fail(self._down)
        self._queue.wake()

    def _hung(self, reason: str) -> None:
        """The other half does not answer."""
        self._lost(reason)
