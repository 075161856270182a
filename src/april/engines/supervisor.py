"""When to start again something that died: back-off, and a limit of restarts.

Invariants:
- a start follows a death only after its back-off has passed, or after `wake`;
- the back-off doubles with each death in a row, and begins again once a life has run for `steady_after` seconds;
- `GIVEN_UP` is final: it is reached by more than `max_restarts` deaths in a row that count, or by `give_up`.

    STOPPED ──starting──> STARTING ──running──> RUNNING
                           ^    │                  │
                       starting └──────died────────┤
                           │                       v
                           └──────────────── BACKING_OFF ──> GIVEN_UP

A supervisor decides and waits; its owner starts and watches the process or replica. The clock and the sleep may be
replaced, so the rules can be tested in virtual time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from april.rollout.generation.engine_health import back_off


class LifeState(Enum):
    """State of a supervised process, replica or group."""

    STOPPED = "stopped"
    """It was never started."""
    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    """It died, and is started again after the back-off."""
    GIVEN_UP = "given up"
    """It died, and is not started again."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and how soon, something is started again.

    Args:
        delay: seconds from the first death to the next start. Each further death in a row doubles them, up to 30 s.
        max_restarts: deaths in a row after which it is started again; None: no limit.
        forgiven_after: seconds of running after which earlier deaths no longer count towards `max_restarts`.
        steady_after: seconds of running after which earlier deaths no longer lengthen the back-off.
    """

    delay: float = 1.0
    max_restarts: int | None = None
    forgiven_after: float = 0.0
    steady_after: float = 0.0


class Supervisor:
    """The restarts of one process, replica or group of processes.

    Args:
        policy: the limits.
        clock: returns the time in seconds.
        sleep: waits for a number of seconds.

    Attributes:
        state: changed by `starting`, `running`, `died` and `give_up` alone.
        reason: why it died, the last time.
        deaths: deaths in a row that count towards the limit.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.policy = policy
        self.state = LifeState.STOPPED
        self.reason = ""
        self.deaths = 0
        self._clock = clock
        self._sleep = sleep
        self._short_lives = 0
        """Deaths in a row that lengthen the back-off."""
        self._running_since = math.inf
        self._due = 0.0
        """When the next start is due."""
        self._woken = asyncio.Event()

    @property
    def given_up(self) -> bool:
        return self.state is LifeState.GIVEN_UP

    def starting(self) -> None:
        """Record that a start begins."""
        assert not self.given_up, "what was given up is not started again"
        self.state, self._running_since = LifeState.STARTING, math.inf

    def running(self) -> None:
        """Record that it runs: a start has succeeded."""
        assert not self.given_up, "what was given up is not started again"
        if self.state is not LifeState.RUNNING:
            self.state, self._running_since = LifeState.RUNNING, self._clock()

    def died(self, reason: str, counts: bool = True) -> float | None:
        """Record a death, or a start that failed.

        Args:
            counts: False for an end that is followed by a start in any case; it changes neither back-off nor limit.

        Returns:
            Seconds until the next start; None if it is given up.
        """
        now = self._clock()
        lived = now - self._running_since  # -inf if the start failed
        self._running_since = math.inf
        self.reason = reason
        # Reset before this death is counted: it is the first of a new row.
        if lived >= self.policy.steady_after:
            self._short_lives = 0
        if lived >= self.policy.forgiven_after:
            self.deaths = 0
        self._short_lives += counts
        # A life that has run for so long counts neither.
        self.deaths += counts and lived < self.policy.forgiven_after
        if self.policy.max_restarts is not None and self.deaths > self.policy.max_restarts:
            self.state = LifeState.GIVEN_UP
            return None
        delay = back_off(self.policy.delay, self._short_lives) if counts else 0.0
        self.state, self._due = LifeState.BACKING_OFF, now + delay
        return delay

    def forgive(self) -> None:
        """Forget earlier deaths: the life that runs has made progress."""
        self.deaths = self._short_lives = 0

    def give_up(self, reason: str) -> None:
        """Start it no more."""
        self.state, self.reason = LifeState.GIVEN_UP, reason

    def wake(self) -> None:
        """End the back-off that is being waited out: there is reason to try again at once."""
        # Cleared at once: only back-offs that are being waited out end, no later one.
        self._woken.set()
        self._woken.clear()

    async def back_off(self) -> None:
        """Wait until the next start is due, or until `wake`, after which the back-off begins again."""
        waking = asyncio.ensure_future(self._woken.wait())
        sleeping = asyncio.ensure_future(self._sleep(max(0.0, self._due - self._clock())))
        try:
            await asyncio.wait((waking, sleeping), return_when=asyncio.FIRST_COMPLETED)
            if waking.done():
                self._short_lives = min(self._short_lives, 1)
        finally:
            for task in (waking, sleeping):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
