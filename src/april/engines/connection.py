"""A channel over a socket.

Invariant: messages that are sent in one turn of the event loop are written together.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

from april.engines.channel import ChannelClosedError

HEADER = struct.Struct("<I")
READ_AHEAD = 2**20
"""Bytes that are read ahead of `receive`."""


class Connection:
    """One end of a socket pair, as a channel: each message is pickled behind its length. Make it with `open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unwritten: list[bytes] = []

    @classmethod
    async def open(cls, own_end: socket.socket) -> Connection:
        return cls(*await asyncio.open_unix_connection(sock=own_end, limit=READ_AHEAD))

    def send(self, message: Any) -> None:
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        data = pickle.dumps(message, protocol=5)  # now: the sender may change the message later
        self._unwritten += (HEADER.pack(len(data)), data)

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if not self._writer.is_closing():
            self._writer.writelines(unwritten)

    async def receive(self) -> Any:
        """As `Channel.receive`. A call that is cancelled may lose a message."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise ChannelClosedError("the other process has closed the connection") from None

    def end(self) -> None:
        """Receive only what has arrived: the process at the other end is gone."""
        own_end = self._writer.get_extra_info("socket")
        if not self._writer.is_closing():
            own_end.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        # Messages of this turn are still unwritten, and `_write` drops messages once the writer is closing.
        self._write()
        self._writer.close()
