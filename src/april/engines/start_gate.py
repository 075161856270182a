"""When servers may start on devices that they share with the trainer.

A server measures the device's free memory while it starts, and refuses to start, or dies, if memory is taken or freed
at that time.

Invariant: no server starts while the gate is closed, and the gate closes only when no server is starting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StartGate:
    """Lets servers start while it is open, which it is at first."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._starting = 0
        self._none_starting = asyncio.Event()
        self._none_starting.set()

    @property
    def starting(self) -> int:
        """Number of servers that are starting."""
        return self._starting

    @property
    def closed(self) -> bool:
        """Whether no further server may start now."""
        return not self._open.is_set()

    def open(self) -> None:
        """Let servers start: the trainer holds no memory of the devices, and neither takes nor frees any."""
        self._open.set()

    async def close(self) -> None:
        """Let no further server start, and wait until those that are starting are ready or dead."""
        self._open.clear()
        await self._none_starting.wait()

    @asynccontextmanager
    async def start(self) -> AsyncIterator[None]:
        """Wait until the gate is open; the block starts one server, until it is ready or dead."""
        while not self._open.is_set():
            await self._open.wait()
        self._starting += 1
        self._none_starting.clear()
        try:
            yield
        finally:
            self._starting -= 1
            if not self._starting:
                self._none_starting.set()
