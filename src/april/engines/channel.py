"""Channels between two processes, which carry the messages of an engine that works in another process.

Invariants:
- messages arrive once, in the order in which they were sent;
- every message that arrived is received, also those that arrived before the channel closed;
- a message is handed to its listener in the turn of the event loop in which it arrived: an engine may compute for a
  long time in each turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from april.rollout.engine import EngineError


class ChannelClosedError(EngineError):
    """The channel is closed, and everything that arrived on it has been received. The message gives the reason."""


OnMessage: TypeAlias = Callable[[Any], object]
OnClose: TypeAlias = Callable[[str], object]
"""Takes the reason."""


class Channel(Protocol):
    """One end of a channel. Both ends trust each other: messages are any objects that can be pickled."""

    def send(self, message: Any) -> None:
        """Send a message without waiting; a closed channel drops it."""
        ...

    def listen(self, on_message: OnMessage, on_close: OnClose) -> None:
        """Hand every message to `on_message`, also those that have arrived before; call `on_close` after the last."""
        ...

    def close(self) -> None: ...


class Inbox:
    """Messages that arrived, for a listener, or for tasks that get them."""

    def __init__(self) -> None:
        self._on_message: OnMessage | None = None
        self._on_close: OnClose | None = None
        self._messages: deque[Any] = deque()
        self._changed = asyncio.Event()
        self.closed: str | None = None
        """Why no more messages arrive; None while they may."""

    def put(self, message: Any) -> None:
        if self.closed is not None:
            return
        if self._on_message is not None:
            self._on_message(message)
        else:
            self._messages.append(message)
            self._changed.set()

    def listen(self, on_message: OnMessage, on_close: OnClose) -> None:
        """As `Channel.listen`."""
        assert self._on_message is None, "one listener at a time"
        self._on_message, self._on_close = on_message, on_close
        while self._messages:
            on_message(self._messages.popleft())
        if self.closed is not None:
            on_close(self.closed)

    def close(self, reason: str) -> None:
        """Accept no more messages. The first reason is kept."""
        if self.closed is None:
            self.closed = reason
            self._changed.set()
            if self._on_close is not None:
                self._on_close(reason)

    async def get(self) -> Any:
        """Wait for the next message and remove it.

        Raises:
            ChannelClosedError: no more messages arrive.
        """
        await self._wait()
        return self._messages.popleft()

    async def get_all(self) -> list[Any]:
        """Wait for a message and remove all that there are.

        Raises:
            ChannelClosedError: no more messages arrive.
        """
        await self._wait()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    async def _wait(self) -> None:
        while not self._messages:
            if self.closed is not None:
                raise ChannelClosedError(self.closed)
            self._changed.clear()
            await self._changed.wait()
