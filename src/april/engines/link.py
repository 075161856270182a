"""Objects over a socket between this process and one that it started."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("<I")


class Link(asyncio.Protocol):
    """One end of a socket pair; both ends trust each other.

    Args:
        received: called with each object that comes.
        lost: called once the other end is gone.
        flowing: called whenever the other end begins to take again what it had left unread.
    """

    _transport: asyncio.Transport

    def __init__(
        self, received: Callable[[Any], None], lost: Callable[[], None], flowing: Callable[[], None] = lambda: None
    ) -> None:
        self._received = received
        self._lost = lost
        self._flowing = flowing
        self._buffer = bytearray()
        self.full = False
        """The other end is behind: what is sent now waits in this process."""
        self._reading = True

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        self._transport.writelines((HEADER.pack(len(data)), data))

    def read(self, on: bool) -> None:
        """Take what comes, or let the other end feel that it is too much."""
        if on != self._reading and not self._transport.is_closing():
            self._reading = on
            if on:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) >= start + HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            begin = start + HEADER.size
            if len(buffer) < begin + size:
                break
            with memoryview(buffer) as view:
                message = pickle.loads(view[begin : begin + size])
            start = begin + size
            self._received(message)
        if start:
            del buffer[:start]

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._flowing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()
