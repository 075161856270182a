"""An engine that a process elsewhere uses over a channel: the other end of a `RemoteEngine`.

Invariants:
- chunks are sent in the order in which the engine handed them out, and those that an interrupt returns are sent before
  the interrupt is answered;
- the engine is polled for as long as samples are in flight and fewer than `window` chunks that were sent have not been
  handed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from april.engines.channel import Channel
from april.engines.packed import pack
from april.engines.remote import WINDOW
from april.engines.rpc import RpcServer, reason_of
from april.rollout.engine import Chunk, Fault

if TYPE_CHECKING:
    import torch

RETRY_SECONDS = 0.02
"""Pause after an engine returned no chunks with samples in flight: it may be about to report failed requests."""


class RemoteWeights(Protocol):
    """What an update sends to the process of an engine."""

    async def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors with their names, read in the engine's process."""
        ...


class EngineServer:
    """Serves `engine` to the process at the other end of `channel`.

    Args:
        engine: as `april.rollout.engine.Engine`. Requests are handed to its `submit` as they were sent.
        window: chunks that may be sent before the other end has handed them out.
        batch_seconds: chunks are collected for so long and sent together. Engines of one process send at the same
            moments, so that their chunks are written to the connection together.
    """

    def __init__(self, engine: Any, channel: Channel, window: int = WINDOW, batch_seconds: float = 0.0) -> None:
        self._engine = engine
        self._channel = channel
        self._window = window
        self._batch_seconds = batch_seconds
        self._in_flight: set[str] = set()
        self._submitted = asyncio.Event()
        self._outstanding = 0
        """Chunks that were sent and have not been handed out at the other end."""
        self._room = asyncio.Event()
        self._ended = asyncio.Event()
        self._rpc = RpcServer(channel.send, self._call)

    async def run(self) -> None:
        """Serve until the channel closes. The engine is left as it is then."""
        generating = asyncio.create_task(self._generate(), name="generate for a remote engine")
        try:
            self._channel.listen(self._take, lambda reason: self._ended.set())
            await self._ended.wait()
        finally:
            generating.cancel()
            await asyncio.gather(generating, self._rpc.close(), return_exceptions=True)

    async def _generate(self) -> None:
        try:
            while True:
                await self._submitted.wait()
                self._submitted.clear()
                while self._in_flight:
                    await self._send_next()
        except Exception as error:  # any error: the other end waits for chunks
            self._channel.send(("failed", reason_of(error)))

    async def _send_next(self) -> None:
        """Wait for chunks and send them."""
        # Sleep until a multiple of the interval on the loop's clock, which all engines of this process share.
        if self._batch_seconds:
            await asyncio.sleep(self._batch_seconds - asyncio.get_running_loop().time() % self._batch_seconds)
        # Check the window before the poll: chunks that were polled have left the engine and must be sent.
        while self._outstanding >= self._window:
            self._room.clear()
            await self._room.wait()
        if chunks := await self._engine.poll():
            self._send(chunks)
        elif self._in_flight:
            await asyncio.sleep(RETRY_SECONDS)

    def _send(self, chunks: list[Chunk]) -> None:
        if not chunks:
            return
        self._in_flight.difference_update(c.sample_id for c in chunks if c.finish is not None or c.error is not None)
        self._outstanding += len(chunks)
        self._channel.send(("chunks", pack(chunks), getattr(self._engine, "running", 0)))

    def _take(self, message: Any) -> None:
        if self._ended.is_set():
            return
        try:
            self._received(message)
        except Exception as error:  # any error: the other end waits for answers
            self._channel.send(("failed", reason_of(error)))
            self._ended.set()

    def _received(self, message: Any) -> None:
        match message:
            case "submit", sample_id, request:
                # Added before the call: the chunk of a refused request removes the sample again.
                self._in_flight.add(sample_id)
                try:
                    self._engine.submit(request)
                except ValueError as error:
                    version = getattr(self._engine, "version", 0)
                    self._send([Chunk(sample_id, (), (), version, error=str(error), fault=Fault.REFUSED)])
                self._submitted.set()
            case "handed out", count:
                self._outstanding -= count
                self._room.set()
            case "notify", method, arguments:
                getattr(self._engine, method)(*arguments)
            case "call", number, method, arguments:
                self._rpc.called(number, method, arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        match method, arguments:
            case "ping", ():
                pass
            case "interrupt", (names,):
                # Removed before the await: `_generate` must not wait for tokens of samples that are being stopped.
                self._in_flight.difference_update(self._in_flight.copy() if names is None else names)
                self._send(await self._engine.interrupt(names))
            case "abandon", ():
                self._in_flight.clear()
                self._send(await self._engine.abandon())
            case "update_weights", (version, weights):
                tensors = None if weights is None else await weights.tensors()
                await self._engine.update_weights(version, tensors)
            case _:
                await getattr(self._engine, method)(*arguments)
