"""An engine that works elsewhere: in another process, in an actor, on another machine.

`RemoteEngine` is this process's end of a channel, `EngineServer` the other end.

Invariants:
- every chunk that arrived is handed out exactly once, also if the engine dies;
- nothing waits for ever: the death of the engine, or a hang, ends every wait for it with an `EngineError`;
- except in an interrupt, the engine never sends more than `window` chunks that have not been handed out: a consumer
  that falls behind makes the engine wait (back-pressure), and never delays the answer to a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from april.engines.channel import Channel
from april.engines.chunk_queue import ChunkQueue
from april.engines.fit import require_room
from april.engines.packed import PackedChunks, unpack
from april.engines.rpc import RpcClient
from april.rollout.engine import Capacity, Chunk, EngineError
from april.rollout.patience import patient_timeout
from april.rollout.trajectory.sample import Sample

LOADING_SECONDS = 1800.0
"""Time limit for loading a model or new weights."""
WINDOW = 2**16
"""Chunks that an engine may send ahead of its consumer, enough to generate on while a trainer blocks the event loop."""


class RemoteEngine:
    """Base of engines whose work is done at the other end of a channel. `_connect` starts a session.

    Attributes:
        patience: seconds that a forward pass may take. After so long without a chunk the engine is pinged, and counts
            as hung if it does not answer in the same time again.
        call_timeout: seconds that an interrupt may take.
        window: chunks that may be on their way or waiting to be handed out.
        batch_seconds: as of `EngineServer`.
    """

    patience = 120.0
    call_timeout = 120.0
    window = WINDOW
    batch_seconds = 0.0

    def __init__(self) -> None:
        self.capacity = Capacity(0, 0)
        self.version = 0
        self.running = 0
        self._in_flight: set[str] = set()
        self._queue = ChunkQueue()
        self._unacknowledged = 0
        """Chunks that were handed out or dropped, and not acknowledged to the engine yet."""
        self._down: str | None = "it has not been started yet"
        """Why the engine does not work; None while it does."""
        self._channel: Channel
        self._rpc: RpcClient

    def _connect(self, channel: Channel) -> None:
        """Start a session over `channel`."""
        self._disconnect("it was connected anew")
        self._queue.take(None)  # chunks of an earlier session would come a second time
        self._in_flight.clear()
        self._channel, self._down, self._unacknowledged = channel, None, 0
        self._rpc = RpcClient(channel.send, self._hung)
        channel.listen(self._received, self._lost)

    async def _load(self, channel: Channel, loader: Any, limit: float) -> Any:
        """Start a session over the channel of a `HostProcess`, have it load the engine and return its capacity.

        Args:
            loader: an `EngineLoader`.
        """
        self._connect(channel)
        return await self._call("load", loader, self.window, self.batch_seconds, limit=limit)

    def _disconnect(self, reason: str) -> None:
        """End the session; nothing that arrives later is heard."""
        if self._down is None:
            self._lost(reason)

    def _received(self, message: Any) -> None:
        match message:
            case "chunks", packed, running:
                self.running = running
                self._arrived(packed)
            case "answer", number, error, value:
                self._rpc.answered(number, error, value)
            case "failed", reason:
                self._lost(reason)

    def _arrived(self, packed: PackedChunks) -> None:
        for chunk in unpack(packed):
            if chunk.sample_id in self._in_flight:
                self._queue.put(chunk)
            else:  # of a sample that was given up
                self._acknowledge(1)

    @property
    def behind(self) -> bool:
        """The consumer is behind: the engine waits until more chunks have been handed out."""
        return len(self._queue) + self._unacknowledged >= self.window

    def _acknowledge(self, count: int) -> None:
        """Allow the engine to send more chunks. Acknowledgements are collected: each is a message."""
        # At an eighth of the window, messages are few and the engine seldom has to wait for one.
        self._unacknowledged += count
        if self._unacknowledged >= max(1, self.window // 8) and self._down is None:
            self._channel.send(("handed out", self._unacknowledged))
            self._unacknowledged = 0

    def _lost(self, reason: str) -> None:
        """End the session: the engine is gone. Chunks that have arrived are still handed out."""
        if self._down is None:
            self._down = reason
            self._rpc.fail(reason)
            self._channel.close()
            self._queue.wake()

    def _hung(self, reason: str) -> None:
        """Handle an engine that does not answer. Subclasses kill it."""
        self._lost(reason)

    def _require_alive(self) -> None:
        """Raises EngineError if the engine is gone."""
        if self._down is not None:
            raise EngineError(self._down)

    async def _call(self, method: str, *arguments: Any, limit: float | None = None) -> Any:
        self._require_alive()
        return await self._rpc.call(method, *arguments, limit=self.call_timeout if limit is None else limit)

    def _notify(self, method: str, *arguments: Any) -> None:
        """Have the engine call a method, if it is alive."""
        if self._down is None:
            self._channel.send(("notify", method, arguments))

    def submit(self, sample: Sample) -> None:
        require_room(sample, self.capacity.context_length, "the engine")
        self._submit(sample.id, sample.with_outlined_routes())

    def _submit(self, sample_id: str, request: Any) -> None:
        # If the engine is gone, the next `poll` raises: `submit` raises only for invalid requests.
        self._in_flight.add(sample_id)
        if self._down is None:
            self._channel.send(("submit", sample_id, request))

    async def poll(self) -> list[Chunk]:
        while self._in_flight and not self._queue:
            # Checked only once the queue is empty: chunks that arrived before the engine died are handed out first.
            self._require_alive()
            try:
                async with patient_timeout(self.patience):
                    await self._queue.ready()
            except TimeoutError:
                await self.ping()
        return self._take()

    async def ping(self) -> None:
        """See that the engine answers.

        Raises:
            EngineError: it is gone, or has not answered for `patience` seconds.
        """
        await self._call("ping", limit=self.patience)

    def _take(self, names: set[str] | None = None) -> list[Chunk]:
        chunks = self._queue.take(names)
        self._in_flight.difference_update(c.sample_id for c in chunks if c.finish is not None or c.error is not None)
        if chunks:
            self._acknowledge(len(chunks))
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        names = None if sample_ids is None else set(sample_ids)
        stopped = self._in_flight.copy() if names is None else self._in_flight & names
        if stopped and self._down is None:
            await self._call("interrupt", None if names is None else stopped)
        chunks = self._take(names)
        self._in_flight -= stopped
        # A poll that waits for these samples has to return.
        self._queue.wake()
        return chunks

    async def abandon(self) -> list[Chunk]:
        """End the session without a message to the engine; return the chunks that had arrived."""
        self._disconnect("it was given up")
        chunks = self._take()
        self._in_flight.clear()
        self.running = 0
        return chunks

    async def check(self) -> None:
        """See that the engine is alive. A hang is found by the call that waits."""
        self._require_alive()

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Change to policy `version`. The form of `weights` depends on the class; see `_remote_weights`."""
        if self._in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        await self._call("update_weights", version, self._remote_weights(weights), limit=LOADING_SECONDS)
        self.version = version

    def _remote_weights(self, weights: Any) -> Any:
        """Return the message for `weights`: None, or a `RemoteWeights`.

        Raises:
            ValueError: there are no weights there.
        """
        raise NotImplementedError

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self._notify("forget", None if sample_ids is None else list(sample_ids))
