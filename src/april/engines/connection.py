"""A channel over a socket.

Invariant: messages that are sent in one turn of the event loop are written together.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

from april.engines.channel import Inbox, OnClose, OnMessage

HEADER = struct.Struct("<I")
CLOSED = "the other process has closed the connection"


class Connection(asyncio.Protocol):
    """One end of a socket pair, as a channel: each message is pickled behind its length. Make it with `open`."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._unread = bytearray()
        self._unwritten: list[bytes] = []

    @classmethod
    async def open(cls, own_end: socket.socket) -> Connection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(cls, sock=own_end)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, message: Any) -> None:
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        data = pickle.dumps(message, protocol=5)  # now: the sender may change the message later
        self._unwritten += (HEADER.pack(len(data)), data)

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if not self._transport.is_closing():
            self._transport.writelines(unwritten)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        begin = 0
        while (end := self._end_of_message(begin)) is not None:
            with memoryview(self._unread) as unread, unread[begin + HEADER.size : end] as pickled:
                message = pickle.loads(pickled)
            begin = end
            self._inbox.put(message)
        del self._unread[:begin]

    def _end_of_message(self, begin: int) -> int | None:
        """Return where the message that begins at `begin` ends; None if it has not arrived as a whole."""
        if begin + HEADER.size > len(self._unread):
            return None
        end: int = begin + HEADER.size + HEADER.unpack_from(self._unread, begin)[0]
        return end if end <= len(self._unread) else None

    def eof_received(self) -> None:
        # The other process is gone. Data for it must not keep the connection open: its children may hold its end.
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inbox.close(CLOSED)

    def listen(self, on_message: OnMessage, on_close: OnClose) -> None:
        self._inbox.listen(on_message, on_close)

    def end(self) -> None:
        """Receive only messages that have arrived: the process at the other end is gone."""
        if not self._transport.is_closing():
            self._transport.get_extra_info("socket").shutdown(socket.SHUT_RD)

    def close(self) -> None:
        # Messages of this turn are still unwritten, and `_write` drops messages once the transport is closing.
        self._write()
        self._transport.close()
