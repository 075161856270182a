"""The time that a program uses: it stands still while the program waits for the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ProgramClock:
    """Clock of one program.

    Args:
        deadline: seconds after which `on_deadline` is called; None for no limit.
    """

    def __init__(self, deadline: float | None, on_deadline: Callable[[], None]) -> None:
        self.deadline = deadline
        self.used = 0.0
        """Seconds of the laps so far."""
        self.running = False
        self._on_deadline = on_deadline
        self._waiting = 0
        self._lap = 0.0
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The program begins its work."""
        self.running = True
        self._update()

    def stop(self) -> None:
        """The program has ended."""
        self.running = False
        self._update()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A request of the program waits for the policy inside."""
        self._waiting += 1
        self._update()
        try:
            yield
        finally:
            self._waiting -= 1
            self._update()

    def lap(self) -> float:
        """Return the seconds since the last lap, and begin the next one."""
        self._read()
        seconds, self._lap = round(self._lap, 6), 0.0
        self.used += seconds
        return seconds

    def _read(self) -> None:
        if self._since is not None:
            now = asyncio.get_running_loop().time()
            self._lap += now - self._since
            self._since = now

    def _update(self) -> None:
        self._read()
        ticks = self.running and not self._waiting
        if ticks == (self._since is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        self._since = loop.time() if ticks else None
        if ticks and self.deadline is not None:
            left = max(self.deadline - self.used - self._lap, 0.0)
            self._timer = loop.call_later(left, self._on_deadline)
