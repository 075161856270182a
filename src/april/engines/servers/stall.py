"""When data last arrived from a server: a watch for stalls, and a wait for silence.

Invariant: only time in which this process read what the server sent counts as a stall.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from april.engines.rpc import UNREAD


class StallWatch:
    """Calls `stalled` when nothing has arrived for `timeout` seconds although something is expected.

    One timer serves all streams of a server: a timeout for every read would cost more.

    Args:
        timeout: seconds without data.
        expecting: returns whether data is expected.
        reading: returns whether data is read. While the consumer is behind, streams are left unread (back-pressure).
        stalled: called once per stall.
    """

    def __init__(
        self,
        timeout: float,
        expecting: Callable[[], bool],
        reading: Callable[[], bool],
        stalled: Callable[[], None],
    ) -> None:
        self.timeout = timeout
        self._expecting = expecting
        self._reading = reading
        self._stalled = stalled
        self._latest = 0.0
        self._rechecked = -1.0
        self._timer: asyncio.TimerHandle | None = None
        self._activity = asyncio.Event()

    def arrived(self) -> float:
        """Record that data arrived, or that reading begins again. Return the time."""
        self._activity.set()
        self._latest = asyncio.get_running_loop().time()
        return self._latest

    async def silence(self, seconds: float) -> None:
        """Wait until nothing has arrived for `seconds`."""
        while True:
            self._activity.clear()
            try:
                async with asyncio.timeout(seconds):  # noqa: TID251 (no answer is expected)
                    await self._activity.wait()
            except TimeoutError:
                return

    def start(self) -> None:
        if self._timer is None:
            self._check_at(asyncio.get_running_loop().time() + self.timeout)

    def _check_at(self, time: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(time, self._check, time)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        self._timer = None
        if not self._expecting():
            return
        if not self._reading():
            self._latest = now
        # Arrivals do not move the timer, which would cost time for each: it is set again here.
        if now < self._latest + self.timeout:
            self._check_at(self._latest + self.timeout)
        # The event loop was blocked: read the data that arrived during that time. Once for each silence, as a loop that
        # is blocked again and again must not wait for ever.
        elif now - due > UNREAD and self._rechecked != self._latest:
            self._rechecked = self._latest
            self._check_at(now + UNREAD)
        else:
            self._stalled()
