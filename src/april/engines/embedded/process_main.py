"""What an `EngineProcess` runs: an embedded engine that is polled for as long as something is in flight.

    python -m april.engines.embedded.process_main FD

with FD its end of a socket pair. It ends when the other end is closed.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from april.engines.embedded.engine import EmbeddedEngine
from april.engines.embedded.process import ProcessSettings
from april.engines.servers.link import Link
from april.engines.servers.packed import pack
from april.rollout.engine import Chunk
from april.rollout.trajectory import Sample


class Process:
    """The engine, and the trainer at the other end of the link."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._engine: EmbeddedEngine
        self._link = Link(self._received, self.ended.set)
        self._work = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self, own_end: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._link, sock=own_end)
        generating = asyncio.create_task(self._generate())
        await asyncio.wait((generating, asyncio.create_task(self.ended.wait())), return_when=asyncio.FIRST_COMPLETED)
        generating.cancel()

    async def _generate(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while chunks := await self._engine.poll():
                self._send(chunks)

    def _send(self, chunks: list[Chunk]) -> None:
        self._link.send(("chunks", pack(chunks), self._engine.running))

    def _received(self, message: Any) -> None:
        match message:
            case "submit", Sample() as sample:
                try:
                    self._engine.submit(sample)
                except ValueError as error:
                    self._send([Chunk(sample.id, (), (), self._engine.version, error=str(error))])
                self._work.set()
            case "forget", sample_ids:
                self._engine.forget(sample_ids)
            case "call", number, what, arguments:
                task = asyncio.create_task(self._answer(number, what, arguments))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        answer = error = None
        try:
            answer = await self._do(what, *arguments)
        except Exception as failure:  # whoever asked waits for an answer
            error = str(failure) or type(failure).__name__
        self._link.send(("done", number, error, answer))

    async def _do(self, what: str, *arguments: Any) -> Any:
        match what, arguments:
            case "open", (ProcessSettings() as settings,):
                self._engine = _engine_of(settings)
                capacity = self._engine.capacity
                return capacity.slots, capacity.context_length, capacity.kv_tokens
            case "interrupt", (names,):
                if chunks := await self._engine.interrupt(names):
                    self._send(chunks)
            case "update", (version, directory):
                await self._engine.update_weights(version, _tensors(directory))
        return None


def _engine_of(settings: ProcessSettings) -> EmbeddedEngine:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    transformers_logging.disable_progress_bar()
    # Without a word, transformers would ask whether to run the code that a model brings.
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype), trust_remote_code=False
    )
    return EmbeddedEngine(
        model.to(settings.device),
        max_running=settings.max_running,
        context_length=settings.context_length,
        kv_cache_bytes=settings.kv_cache_bytes,
        on_update=settings.on_update,
        draft_tokens=settings.draft_tokens,
        stream_interval=settings.stream_interval,
    )


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                yield name, file.get_tensor(name)


if __name__ == "__main__":
    asyncio.run(Process().run(socket.socket(fileno=int(sys.argv[1]))))
