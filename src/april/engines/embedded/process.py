"""The embedded engine in a process of its own, on a copy of the policy, which generates while the trainer trains.

Invariants:
- what the process sampled and sent is handed out exactly once, also if the process dies;
- the process ends with the one that started it, however that ends: it is gone once its end of the link is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.engines.chunk_queue import ChunkQueue
from april.engines.servers.link import Link
from april.engines.servers.packed import unpack
from april.engines.weights import directory_of
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.trajectory import Sample

GRACE = 5.0
"""Seconds that the process has to end itself before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What the process runs: settings as of `EmbeddedEngine`.

    Args:
        model: a Hugging Face causal language model, as a directory or a hub name; weights come by `update_weights`.
        dtype: of its parameters, a name of torch's.
        device: as torch names it.
        threads: CPU threads of torch; None: as torch chooses.
    """

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    max_running: int = 64
    context_length: int | None = None
    kv_cache_bytes: int | None = None
    on_update: KVPolicy = "recompute"
    draft_tokens: int = 0
    stream_interval: int = 1


class EngineProcess:
    """An engine whose work is done in another process. Make it with `start`."""

    def __init__(self) -> None:
        self.capacity = Capacity(0, 0)
        self.version = 0
        self.running = 0
        self.process: asyncio.subprocess.Process | None = None
        self._link: Link
        self._queue = ChunkQueue()
        self._in_flight: set[str] = set()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._down: str | None = None

    @classmethod
    async def start(cls, settings: ProcessSettings) -> EngineProcess:
        """Start the process and wait until it has loaded the model.

        Raises:
            EngineError: it cannot be started, or refuses the model; the message says why.
        """
        engine = cls()
        ours, theirs = socket.socketpair()
        try:
            engine.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "april.engines.embedded.process_main", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the trainer, which ends it
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"the engine's process could not be started: {error}") from error
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        _, engine._link = await loop.create_connection(lambda: Link(engine._received, engine._lost), sock=ours)
        try:
            slots, context_length, kv_tokens = await engine._call("open", settings)
        except BaseException:
            await engine.close()
            raise
        engine.capacity = Capacity(slots, context_length, kv_tokens)
        return engine

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
            await self._queue.ready()
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
        """Go over to policy `version`, whose tensors are in safetensors files in the directory `weights`."""
        if self._in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        await self._call("update", version, Path(directory_of(weights)))
        self.version = version

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        if self._down is None:
            self._link.send(("forget", None if sample_ids is None else list(sample_ids)))

    async def close(self) -> None:
        self._down = self._down or "the engine's process has been closed"
        self._link.close()
        if self.process is not None:
            try:
                async with asyncio.timeout(GRACE):
                    await self.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()

    async def _call(self, what: str, *arguments: Any) -> Any:
        if self._down is not None:
            raise EngineError(self._down)
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._link.send(("call", number, what, arguments))
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    def _received(self, message: Any) -> None:
        match message:
            case "chunks", packed, running:
                self.running = running
                for chunk in unpack(packed):
                    if chunk.sample_id in self._in_flight:
                        self._queue.put(chunk)
            case "done", number, error, answer:
                if (call := self._calls.get(number)) is not None and not call.done():
                    if error is None:
                        call.set_result(answer)
                    else:
                        call.set_exception(EngineError(error))

    def _lost(self) -> None:
        self._down = self._down or "the process of the embedded engine has died: april resume goes on with the run"
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineError(self._down))
        self._queue.wake()
