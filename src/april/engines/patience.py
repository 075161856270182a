"""Time limits for the answers of other processes.

Invariant: only time in which this event loop ran counts. After the loop was blocked, or the machine was busy, a timer
is overdue before the answer has been read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

TICKS = 8
"""Parts of a limit. The loop may be blocked at any time and for any time; each time counts as at most one part."""


async def within(seconds: float, answer: Awaitable[T]) -> T:
    """Return what `answer` returns.

    Raises:
        TimeoutError: there is no answer after `seconds` of a running event loop; the wait for it is cancelled.
    """
    task = asyncio.ensure_future(answer)
    try:
        for _ in range(TICKS):
            if (await asyncio.wait((task,), timeout=seconds / TICKS))[0]:
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))  # no task outlives this call
            if not task.cancelled():
                task.exception()  # mark it as retrieved: the time limit is reported
