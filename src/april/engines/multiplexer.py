"""Several channels over one connection.

Invariants:
- one end opens channels, the other end accepts them;
- a channel that either end closes is closed at both ends, and `Multiplexer.close` closes all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from april.engines.channel import Channel, Inbox, OnClose, OnMessage


class SharedChannel:
    """One of the channels of a connection."""

    def __init__(self, multiplexer: Multiplexer, number: int) -> None:
        self.number = number
        self.inbox = Inbox()
        self._multiplexer = multiplexer

    def send(self, message: Any) -> None:
        if self.inbox.closed is None:
            self._multiplexer.send(("message", self.number, message))

    async def receive(self) -> Any:
        """Return the next message, before a listener has the others.

        Raises:
            ChannelClosedError: no more messages arrive.
        """
        return await self.inbox.get()

    def listen(self, on_message: OnMessage, on_close: OnClose) -> None:
        self.inbox.listen(on_message, on_close)

    def close(self) -> None:
        if self.inbox.closed is None:
            self.inbox.close("this process has closed the channel")
            self._multiplexer.release(self.number)


class Multiplexer:
    """Channels over `connection`.

    Args:
        on_close: called once the connection has closed; the channels are closed by `close` alone.
        accept: called with each channel that the other end opens.
    """

    def __init__(
        self, connection: Channel, on_close: OnClose, accept: Callable[[SharedChannel], object] | None = None
    ) -> None:
        self._connection = connection
        self._accept = accept
        self._channels: dict[int, SharedChannel] = {}
        self._numbers = itertools.count()
        self._closed: str | None = None
        connection.listen(self._distribute, on_close)

    def open(self) -> SharedChannel:
        """Return a new channel. After the connection has closed, the channel is closed as well."""
        channel = SharedChannel(self, next(self._numbers))
        if self._closed is None:
            self._channels[channel.number] = channel
            self.send(("open", channel.number))
        else:
            channel.inbox.close(self._closed)
        return channel

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def release(self, number: int) -> None:
        """Close the other end of a channel that was closed here."""
        if self._channels.pop(number, None) is not None:
            self.send(("close", number))

    def _distribute(self, message: Any) -> None:
        """Hand a message to its channel."""
        match message:
            case "message", number, content:
                # Messages may be in flight when this end closes their channel: drop them.
                if (channel := self._channels.get(number)) is not None:
                    channel.inbox.put(content)
            case "open", number:
                channel = self._channels[number] = SharedChannel(self, number)
                if self._accept is not None:
                    self._accept(channel)
            case "close", number:
                if (channel := self._channels.pop(number, None)) is not None:
                    channel.inbox.close("the other process has closed the channel")

    def close(self, reason: str) -> None:
        """Close all channels. The first reason is kept."""
        self._closed = self._closed or reason
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.inbox.close(self._closed)
