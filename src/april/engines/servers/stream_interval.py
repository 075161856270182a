"""How many tokens of a sample a server sends together.

An event costs whoever reads it about as much as twenty tokens do, so events of many tokens are cheap. What a server has
not sent yet comes with an abort, but is lost with a connection, and is sampled again. So a stream may keep what it
samples in `AT_RISK` seconds, whatever the server's speed.
"""

from __future__ import annotations

import logging
from typing import Literal

log = logging.getLogger(__name__)

Interval = int | Literal["auto"]

AT_RISK = 1.0
"""Seconds of a stream's work that a lost connection may cost."""
MOST = 64
"""Tokens beyond which an event is hardly cheaper by the token."""
UNKNOWN = 8
"""Tokens while the speed is not known."""
MEMORY = 0.9
"""How much what was known of the speed counts beside each newly measured stream."""


class StreamInterval:
    """The interval of a server's streams.

    Args:
        setting: tokens, or "auto": as many as a stream samples in `AT_RISK` seconds, at most `MOST`.
    """

    def __init__(self, setting: Interval) -> None:
        if setting != "auto" and setting < 1:
            raise ValueError(f'stream_interval = {setting}: must be tokens, at least 1, or "auto"')
        self._setting = setting
        self._speed: float | None = None
        self._warned = False

    @classmethod
    def of(cls, setting: Interval | StreamInterval) -> StreamInterval:
        """A setting's; one that is there already goes on from what it has measured."""
        return setting if isinstance(setting, StreamInterval) else cls(setting)

    @property
    def tokens(self) -> int:
        if self._setting != "auto":
            return self._setting
        if self._speed is None:
            return UNKNOWN
        return max(1, min(MOST, round(self._speed * AT_RISK)))

    def ended(self, name: str, asked: int, tokens: int, events: int, seconds: float) -> None:
        """A stream has ended, `seconds` after its first event; its `tokens` came in `events`, the first not counted."""
        if tokens < asked or seconds <= 0:
            return
        speed = tokens / seconds
        self._speed = speed if self._speed is None else MEMORY * self._speed + (1 - MEMORY) * speed
        if asked >= 4 and events >= 8 and tokens < 1.5 * events and not self._warned:
            self._warned = True
            log.warning(
                "%s sends one token an event, where events of %d were asked for: that takes this machine several times "
                "the work; see stream_interval in docs/engines.md",
                name,
                asked,
            )
