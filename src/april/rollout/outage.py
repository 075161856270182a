"""How long an engine has answered no request, and how long to wait before the next one."""

from __future__ import annotations

import asyncio
import logging
import math

from april.rollout.engine import Chunk, EngineError, Fault

log = logging.getLogger(__name__)

LONGEST = 30.0
"""Seconds between two attempts at most."""
REFUSED_SECONDS = 15.0
"""Seconds after which an engine that refuses all requests is given up: waiting does not change its settings."""


def back_off(delay: float, failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return min(delay * 2.0 ** min(failures - 1, 60), LONGEST)


class Outage:
    """How long no request has been answered, and what people are told of it.

    Args:
        limit: seconds that it may last.
    """

    TOLD_AFTER = 2.0
    """Seconds after which people are told."""
    TOLD_OF_SILENCE = 10.0
    TOLD_AGAIN = 60.0

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.began: float | None = None
        """The time of the first failure that no token has followed."""
        self.attempts = 0
        """Control requests that have failed."""
        self.next_attempt = 0.0
        self.asked_at: float | None = None
        """When a control request was first sent since the engine last answered."""
        self.asked_in = 0
        """The latest batch of chunks before the control request."""
        self._error = ""
        self._refused = False
        self._told: float | None = None

    def begin(self, now: float, chunk: Chunk) -> None:
        """A request failed."""
        if self.began is None:
            self.began = now
        self._error = chunk.error or ""

    def ask(self, now: float, batch: int) -> None:
        """A control request is sent, after so many batches of chunks."""
        self.asked_at, self.asked_in = self.asked_at or now, batch

    def attempt_failed(self, now: float, delay: float, answer: Chunk) -> None:
        """The control request failed: the next one follows later."""
        self._error, self._refused = answer.error or "", answer.fault is Fault.REFUSED
        self.attempts += 1
        self.next_attempt = now + back_off(delay, self.attempts)

    def end(self) -> None:
        """The engine has answered."""
        if self._told is not None and self.began is not None:
            seconds = asyncio.get_running_loop().time() - self.began
            log.warning("the engine answers again after %.0f s; all samples go on, with every token kept", seconds)
        self.began, self.attempts, self.asked_at, self._told = None, 0, None, None

    @property
    def _ends(self) -> float:
        """When the outage has lasted too long. Until a control request has failed, only the time since the first one
        counts: a sample that waits for its next attempt asks nothing of the engine."""
        assert self.began is not None
        assert self.asked_at is not None
        return (self.began if self.attempts else max(self.began, self.asked_at)) + self._bound

    @property
    def _bound(self) -> float:
        return min(self.limit, REFUSED_SECONDS) if self._refused else self.limit

    @property
    def next(self) -> float | None:
        """When `check` has something to do."""
        if self.began is None or self.asked_at is None:
            return None
        return min(self._ends, self._next_told)

    @property
    def _next_told(self) -> float:
        """When people are told: later if the control request has not failed, but has no answer."""
        if self.began is None or self.asked_at is None:
            return math.inf
        if self._told is not None:
            return self._told + self.TOLD_AGAIN
        return self.began + (self.TOLD_AFTER if self.attempts else self.TOLD_OF_SILENCE)

    def check(self, now: float, waiting: int) -> None:
        """Tell people of the outage, or end it.

        Raises:
            EngineError: it has lasted for `limit` seconds.
        """
        if self.began is None or self.asked_at is None:
            return
        if now >= self._ends:
            raise EngineError(
                f"the engine has {'refused all requests' if self._refused else 'answered no request'} for "
                f"{now - self.began:.0f} s (outage_limit = {self.limit:g}): {self._error}; "
                "every token is kept, and no sample was given up"
            )
        if now >= self._next_told:
            self._told = now
            log.warning(
                "the engine has answered no request for %.0f s: %s; %d samples wait with every token kept; trying "
                "again for at most %.0f s (outage_limit)",
                now - self.began,
                self._error,
                waiting,
                self._bound,
            )
