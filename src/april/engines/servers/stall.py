"""A server that says nothing for too long while something is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallWatch:
    """Calls `stalled` when nothing was heard for `timeout` seconds, unless nothing is expected by then.

    It looks again when the server could have been silent for so long. A timeout for every wait would cost more.
    """

    def __init__(self, timeout: float, expecting: Callable[[], bool], stalled: Callable[[], None]) -> None:
        self.timeout = timeout
        self._expecting = expecting
        self._stalled = stalled
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> float:
        """Something was heard; the time."""
        self._heard = asyncio.get_running_loop().time()
        return self._heard

    def start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.timeout, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if not self._expecting():
            return
        if loop.time() < self._heard + self.timeout:
            self._timer = loop.call_at(self._heard + self.timeout, self._look)
        else:
            self._stalled()
