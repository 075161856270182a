"""An asyncio event loop whose clock is virtual: when nothing is ready to run, time jumps to the next timer.

Invariants:
- `loop.time()` starts at 0 and moves only while nothing is ready to run, exactly to the time of the next timer;
- the schedule depends on the program alone: same program, same order of callbacks.

Work in threads takes no virtual time, and a timer may overtake it; code that runs under this loop should be async.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Polls files without waiting for them, and advances virtual time instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout if timeout is None else 0)
        # asyncio passes the seconds until its next timer.
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time. Without a timer to jump to, it waits for files and threads like any loop."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return virtual seconds since the loop was created."""
        return self._virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
