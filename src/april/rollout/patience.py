"""Time limits for what another process, thread or task does.

Invariant: time in which the event loop was blocked counts little. After the loop was blocked, or the machine was busy,
a timer is overdue before an answer that has arrived is read: `asyncio.timeout` would end the wait for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICKS = 8
"""Parts of a limit. A part that ends late does not count, unless half of the parts are late: a loop that is blocked all
the time must not wait for ever."""
JITTER = 0.1
"""Seconds of lateness that are usual, and no blocked loop."""


@asynccontextmanager
async def patient_timeout(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, but `seconds` count only while the event loop runs.

    Raises:
        TimeoutError: the block took longer.
    """
    async with asyncio.timeout(None) as timeout:  # noqa: TID251
        countdown = None if seconds is None else _Countdown(timeout, seconds / TICKS)
        try:
            yield timeout
        finally:
            if countdown is not None:
                countdown.stop()


class _Countdown:
    """Ends `timeout` after `TICKS` ticks that were on time, or twice as many ticks."""

    def __init__(self, timeout: asyncio.Timeout, seconds: float) -> None:
        self._timeout = timeout
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._ticks = self._on_time = 0
        self._ending = False
        self._start(seconds)

    def _start(self, seconds: float) -> None:
        due = self._loop.time() + seconds
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        self._ticks += 1
        self._on_time += now - due <= max(self._seconds, JITTER)
        if self._on_time < TICKS and self._ticks < 2 * TICKS:
            self._start(self._seconds)
        elif now - due > JITTER and not self._ending:
            self._ending = True
            self._start(JITTER)  # an answer that arrived during the last part takes a few turns to its reader
        else:
            self._timeout.reschedule(now)

    def stop(self) -> None:
        self._timer.cancel()
