"""One replica of a pool: whether it gets work, its requests, and how often they fail.

READY ──dead, hung, failing or restarted──> LOST ──refreshed, has the current weights──> READY
  │                                          └──never started again──> DEAD
  └──an update failed somewhere──> STALE ──has the current weights──> READY
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from april.engines.replica import Replica
from april.engines.supervisor import RestartPolicy, Supervisor
from april.rollout.engine import Chunk, EngineError
from april.rollout.patience import patient_timeout
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

RECOVERY_DELAY = 0.5
"""Seconds before the first attempt to bring a lost replica back."""


class ReplicaState(Enum):
    READY = "ready"
    """It holds the pool's weights and gets work."""
    LOST = "lost"
    """It is dead, hung, failing or restarted. Attempts are made to bring it back."""
    DEAD = "dead"
    """It is dead, and nothing starts it again."""
    STALE = "stale"
    """An update failed, on it or on another replica, so its weights may not be the pool's."""


class FailureRate:
    """Share of a replica's latest requests that failed.

    Each new request lowers the weight of earlier requests by 1 %, so about the last 100 requests count. Requests in
    flight are included: a few failures among many requests that began together are a small share.
    """

    MEMORY = 0.99

    def __init__(self) -> None:
        self._requests = 0.0
        self._failed = 0.0

    def began(self) -> None:
        self._requests = self._requests * self.MEMORY + 1
        self._failed *= self.MEMORY

    def failed(self) -> None:
        self._failed += 1

    def reaches(self, share: float, at_least: int) -> bool:
        """Return whether at least `share` of the requests failed, and at least `at_least` of them."""
        # Decay makes the count fractional: compare it as if it were rounded.
        return self._failed > at_least - 0.5 and self._failed >= share * self._requests

    def __str__(self) -> str:
        return f"about {self._failed:.0f} of its last {self._requests:.0f} requests failed"


class Request(NamedTuple):
    """What a pool keeps of a sample that is in flight on a replica."""

    resumed: bool
    """The sample had tokens when it was submitted."""
    multi_turn: bool
    """Stopping ends a turn of the sample, not the sample."""

    @classmethod
    def of(cls, sample: Sample) -> Request:
        return cls(bool(sample.segments), sample.sampling.max_turns > 0)


@dataclass(slots=True, eq=False)
class Member:
    """A replica in a pool."""

    replica: Replica
    samples: dict[str, Request] = field(default_factory=dict)
    """Samples in flight on this replica."""
    failed: dict[str, Chunk] = field(default_factory=dict)
    """Failures held back until a health check shows whether the replica is their cause."""
    state: ReplicaState = ReplicaState.READY
    reason: str = ""
    """Why it is not ready."""
    supervisor: Supervisor = field(default_factory=lambda: Supervisor(RestartPolicy(RECOVERY_DELAY)))
    failures: FailureRate = field(default_factory=FailureRate)
    given: int = 0
    """Samples that it was given so far."""
    losses: int = 0
    """Times that it was lost."""
    polling: asyncio.Task[None] | None = None
    check: asyncio.Task[None] | None = None
    recovery: asyncio.Task[None] | None = None
    refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is refreshed as a lost replica, or put to sleep: a refresh would resume a replica that sleeps."""

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def ready(self) -> bool:
        return self.state is ReplicaState.READY

    @property
    def place(self) -> str:
        """Its machine, for messages; empty for an engine in this process."""
        return str(getattr(self.replica, "place", ""))

    @property
    def running(self) -> int:
        """Samples that are decoding."""
        return self.replica.running if self.ready else 0

    @property
    def slots(self) -> int:
        return self.replica.capacity.slots

    @property
    def load(self) -> float:
        """Samples in flight, as a share of its slots."""
        return len(self.samples) / self.replica.capacity.slots

    def become(self, state: ReplicaState, reason: str = "") -> None:
        """Change the state; the only place that does."""
        if state in (ReplicaState.LOST, ReplicaState.DEAD):
            where = f" at {self.place}" if self.place else ""
            log.warning("%s%s is %s: %s", self.name, where, state.value, reason)
            self.losses += state is ReplicaState.LOST
        if state is ReplicaState.READY:
            self.supervisor.running()
        elif state is ReplicaState.DEAD:
            self.supervisor.give_up(reason)
        self.state, self.reason = state, reason
        # Earlier failures predict nothing about a replica that was restarted or has new weights.
        self.failures = FailureRate()

    async def health_problem(self, timeout: float) -> str | None:
        """Run a health check. Return the problem; None if the replica is well."""
        try:
            async with patient_timeout(timeout):
                await self.replica.check()
        except EngineError as error:
            return str(error)
        except TimeoutError:
            return f"no answer to a health check in {timeout:g} s"
        return None
