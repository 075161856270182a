"""When data last arrived from a server: a watch for stalls, and a wait for silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallWatch:
    """Calls `stalled` when nothing has arrived for `timeout` seconds although something is expected.

    One timer serves all streams of a server: a timeout for every read would cost more.

    Args:
        timeout: seconds without data.
        expecting: returns whether data is expected.
        stalled: called once per stall.
    """

    def __init__(self, timeout: float, expecting: Callable[[], bool], stalled: Callable[[], None]) -> None:
        self.timeout = timeout
        self._expecting = expecting
        self._stalled = stalled
        self._latest = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._activity = asyncio.Event()

    def arrived(self) -> float:
        """Record that data arrived. Return the time."""
        self._activity.set()
        self._latest = asyncio.get_running_loop().time()
        return self._latest

    async def silence(self, seconds: float) -> None:
        """Wait until nothing has arrived for `seconds`."""
        while True:
            self._activity.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._activity.wait()
            except TimeoutError:
                return

    def start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.timeout, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if not self._expecting():
            return
        # Arrivals do not move the timer, which would cost time for each: it is set again here.
        if loop.time() < self._latest + self.timeout:
            self._timer = loop.call_at(self._latest + self.timeout, self._check)
        else:
            self._stalled()
