"""Check that an engine has really released its memory: servers report success whether they have or not.

The check compares the memory that all processes hold of each device: before engines start, before an engine sleeps, and
after. The trainer holds the same at these three moments, so the differences are the engine's.

Invariant: the check passes only if each device whose engine held memory has got back at least `expected` bytes, and at
least half of what the engine held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from april.rollout.engine import EngineError

log = logging.getLogger(__name__)

LEAST_SHARE = 0.5
"""Least share of its memory that an engine releases: weights and KV cache are far more than contexts and graphs."""
NOTHING = 0.05
"""Share of the expected bytes below which nothing was released."""
SETTLE_SECONDS = 5.0
"""Seconds that the release may take after the engine has reported it."""
CHECK_SECONDS = 0.1


class FreedMemory:
    """Check of the memory of the devices that engine and trainer share.

    Args:
        used: returns the bytes that all processes hold, by device; empty on machines without GPUs, where the check is
            skipped.
        expected: bytes of each device that an engine releases at least: its share of the weights.
        settle_seconds: time that the release may take.
    """

    def __init__(
        self, used: Callable[[], Mapping[str, int]], expected: int, settle_seconds: float = SETTLE_SECONDS
    ) -> None:
        self._used = used
        self._expected = expected
        self._settle = settle_seconds
        self._without = used()
        """Bytes held while no engine runs."""
        self._before: Mapping[str, int] = {}
        if not self._without:
            log.info("no GPU is visible: the memory that engines release while they sleep is not checked")

    def before(self) -> None:
        """Record the memory that is held while the engine serves."""
        self._before = self._used()

    @property
    def kept(self) -> int:
        """Bytes of the fullest device that are held now and were not before engines started."""
        return max((used - self._without.get(device, 0) for device, used in self._used().items()), default=0)

    async def require(self, flag: str) -> None:
        """Check, after the engine has fallen asleep, that it has released its memory.

        Args:
            flag: option without which the engine releases nothing.

        Raises:
            EngineError: it has not; the message names device, bytes and remedy.
        """
        deadline = asyncio.get_running_loop().time() + self._settle
        while (problem := self._problem(flag)) is not None:
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineError(problem)
            await asyncio.sleep(CHECK_SECONDS)

    def _problem(self, flag: str) -> str | None:
        for device, used in self._used().items():
            held = self._before.get(device, 0) - self._without.get(device, 0)
            if held < self._expected:  # no engine ran there: it had died, or its start had failed
                continue
            freed, needed = self._before[device] - used, max(self._expected, LEAST_SHARE * held)
            if freed >= needed:
                continue
            amounts = f"of the {held / 1e9:.1f} GB of GPU {device} that the engine held"
            if freed < NOTHING * needed:
                return f"{amounts}, nothing was released when it was put to sleep: start its server with {flag}"
            return (
                f"{amounts}, {freed / 1e9:.1f} GB were released when it was put to sleep, where at least "
                f"{needed / 1e9:.1f} GB were expected: look for other processes on this GPU, and for options in "
                "engine.server_args that keep memory"
            )
        return None
