"""Number of tokens of a sample that a server sends together.

Reading an event costs about the time of reading twenty tokens, so events of many tokens are cheap. Tokens that a server
has not sent yet arrive with an abort, but are lost with a connection, and have to be sampled again. So a stream may
hold back the tokens of `AT_RISK` seconds, at any speed of the server.
"""

from __future__ import annotations

import logging
from typing import Literal

log = logging.getLogger(__name__)

Interval = int | Literal["auto"]

AT_RISK = 1.0
"""Seconds of a stream's work that a lost connection may cost."""
MOST = 64
"""Tokens per event beyond which the cost per token hardly falls."""
UNKNOWN = 8
"""Tokens per event while the speed is unknown."""
MEMORY = 0.9
"""Weight of the former estimate of the speed when a stream is measured."""


class StreamInterval:
    """Stream interval of a server.

    Args:
        setting: tokens, or "auto": the number that a stream samples in `AT_RISK` seconds, at most `MOST`.
    """

    def __init__(self, setting: Interval) -> None:
        if setting != "auto" and setting < 1:
            raise ValueError(f'stream_interval = {setting}: must be tokens, at least 1, or "auto"')
        self._setting = setting
        self._speed: float | None = None
        self._warned = False

    @classmethod
    def of(cls, setting: Interval | StreamInterval) -> StreamInterval:
        """Return a setting as an object; an object keeps its measurements."""
        return setting if isinstance(setting, StreamInterval) else cls(setting)

    @property
    def tokens(self) -> int:
        if self._setting != "auto":
            return self._setting
        if self._speed is None:
            return UNKNOWN
        return max(1, min(MOST, round(self._speed * AT_RISK)))

    def ended(self, name: str, asked: int, tokens: int, events: int, seconds: float) -> None:
        """Record that a stream ended `seconds` after its first event, with `tokens` in `events` after the first."""
        # Less than one full event: too short to measure a speed.
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
