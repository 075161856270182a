"""Channels between two processes, which carry the messages of an engine that works in another process.

Invariants:
- messages arrive once, in the order in which they were sent;
- every message that arrived is received, also those that arrived before the channel closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from april.rollout.engine import EngineError


class ChannelClosedError(EngineError):
    """The channel is closed, and everything that arrived on it has been received. The message gives the reason."""


class Channel(Protocol):
    """One end of a channel. Both ends trust each other: messages are any objects that can be pickled."""

    def send(self, message: Any) -> None:
        """Send a message without waiting; a closed channel drops it."""
        ...

    async def receive(self) -> Any:
        """Wait for the next message and return it.

        Raises:
            ChannelClosedError: no more messages arrive.
        """
        ...

    def close(self) -> None: ...


class Inbox:
    """Messages that arrived and have not been received yet."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._changed = asyncio.Event()
        self.closed: str | None = None
        """Why no more messages arrive; None while they may."""

    def put(self, message: Any) -> None:
        if self.closed is None:
            self._messages.append(message)
            self._changed.set()

    def close(self, reason: str) -> None:
        """Accept no more messages. The first reason is kept."""
        if self.closed is None:
            self.closed = reason
            self._changed.set()

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
