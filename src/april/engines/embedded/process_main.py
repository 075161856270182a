"""What an `EngineProcess` runs: an embedded engine and the engine's half of the link.

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

from april.engines.embedded.host import EmbeddedSettings, Host
from april.engines.link import Link


class EngineHost:
    """The engine, and the trainer at the other end of the link."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._host: Host | None = None
        self._opened = asyncio.Event()
        self._link = Link(self._received, self.ended.set)

    async def run(self, own_end: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._link, sock=own_end)
        generating = asyncio.create_task(self._generate())
        await asyncio.wait((generating, asyncio.create_task(self.ended.wait())), return_when=asyncio.FIRST_COMPLETED)
        generating.cancel()

    async def _generate(self) -> None:
        await self._opened.wait()
        assert self._host is not None
        await self._host.generate()

    def _received(self, message: Any) -> None:
        if self._host is not None:
            self._host.received(message)
            return
        _, number, _, (settings,) = message
        try:
            capacity = self._open(settings)
        except Exception as failure:  # whoever asked waits for an answer
            self._link.send(("done", number, str(failure) or type(failure).__name__, None))
        else:
            self._link.send(("done", number, None, capacity))

    def _open(self, settings: EmbeddedSettings) -> tuple[int, int, int | None]:
        engine = settings.load()
        self._host = Host(engine, self._link.send, _tensors)
        self._opened.set()
        capacity = engine.capacity
        return capacity.slots, capacity.context_length, capacity.kv_tokens


async def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no mapping
                    yield name, file.get_tensor(name)

    return each()


if __name__ == "__main__":
    asyncio.run(EngineHost().run(socket.socket(fileno=int(sys.argv[1]))))
