"""Check that an engine has really released its memory: servers report success whether they have or not.

The check compares the memory that all processes hold of each device: before engines start, before an engine sleeps, and
after. The trainer holds the same at these three moments, so the differences are the engine's.

Invariants:
- the check passes only if each device whose engine held memory has got back at least `expected` bytes, and at least
  half of what the engine held;
- a device on which the check could not be made is named in the log.
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
OTHERS_SECONDS = 60.0
"""Seconds that processes of an earlier run may take to leave the devices before engines start."""


class FreedMemory:
    """Check of the memory of the devices that engine and trainer share.

    Args:
        used: returns the bytes that all processes hold, by device; empty on machines without GPUs, where the check is
            skipped.
        expected: bytes of each device that an engine releases at least: its share of the weights.
        flag: option without which the engine releases nothing.
        own: bytes of a device that the trainer holds at most before engines start; None if unknown.
        settle_seconds: time that the release may take.
    """

    def __init__(
        self,
        used: Callable[[], Mapping[str, int]],
        expected: int,
        flag: str,
        own: int | None = None,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._used = used
        self._expected = expected
        self._flag = flag
        self._own = own
        self._settle = settle_seconds
        self._without = used()
        """Bytes held while no engine runs."""
        self._before: Mapping[str, int] = {}
        if not self._without:
            log.info("no GPU is visible: the memory that engines release while they sleep is not checked")

    async def alone(self, seconds: float = OTHERS_SECONDS) -> None:
        """Wait, before engines start, until processes of an earlier run have left the devices.

        Servers of a run that crashed end a little later than the run, and would be taken for the memory that is held
        without an engine.

        Args:
            seconds: time after which engines start anyway, and the log names the bytes that other processes hold.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while others := self._others():
            if asyncio.get_running_loop().time() >= deadline:
                for device, held in others.items():
                    log.warning(
                        "GPU %s: other processes hold %.1f GB; end them, or servers may not find the memory that they "
                        "are given",
                        device,
                        held / 1e9,
                    )
                break
            await asyncio.sleep(CHECK_SECONDS)
        self._without = self._used()

    def _others(self) -> dict[str, int]:
        """Return the bytes of each device that other processes hold, if an engine releases no more than that."""
        own, used = self._own, self._used()
        if own is None:
            return {}
        return {device: held - own for device, held in used.items() if held - own >= max(self._expected, 1)}

    def before(self) -> None:
        """Record the memory that is held while the engine serves."""
        self._before = self._used()

    @property
    def kept(self) -> int:
        """Bytes of the fullest device that are held now and were not before engines started."""
        return max((used - self._without.get(device, 0) for device, used in self._used().items()), default=0)

    async def require(self) -> None:
        """Check, after the engine has fallen asleep, that it has released its memory.

        Raises:
            EngineError: it has not; the message names device, bytes and remedy.
        """
        deadline = asyncio.get_running_loop().time() + self._settle
        for device, held in self._held().items():
            if held < self._expected:  # its server has died, or other memory was freed since the run began
                log.warning(
                    "GPU %s: the engine held %.1f GB before it was put to sleep, and its weights take %.1f GB: whether "
                    "it has released them was not checked",
                    device,
                    max(held, 0) / 1e9,
                    self._expected / 1e9,
                )
        while (problem := self._problem()) is not None:
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineError(problem)
            await asyncio.sleep(CHECK_SECONDS)

    def _held(self) -> dict[str, int]:
        """Return the bytes of each device that the engine held before it was put to sleep."""
        return {device: held - self._without.get(device, 0) for device, held in self._before.items()}

    def _problem(self) -> str | None:
        used_now = self._used()
        for device, held in self._held().items():
            used = used_now.get(device, 0)
            if held < self._expected:
                continue
            freed, needed = self._before[device] - used, max(self._expected, LEAST_SHARE * held)
            if freed >= needed:
                continue
            amounts = f"of the {held / 1e9:.1f} GB of GPU {device} that the engine held"
            if freed < NOTHING * needed:
                return f"{amounts}, nothing was released when it was put to sleep: start its server with {self._flag}"
            return (
                f"{amounts}, {freed / 1e9:.1f} GB were released when it was put to sleep, where at least "
                f"{needed / 1e9:.1f} GB were expected: look for other processes on this GPU, and for options in "
                "engine.server_args that keep memory"
            )
        return None
