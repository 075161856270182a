"""One replica of a pool: whether it gets work, what is in flight on it, and how often its requests fail."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import Enum

from april.engines.replica import Replica
from april.engines.supervisor import RestartPolicy, Supervisor
from april.rollout.engine import Chunk, EngineError
from april.rollout.trajectory import Sample

log = logging.getLogger(__name__)

REVIVAL_DELAY = 0.5
"""Seconds before the first attempt to bring a lost replica back."""


class State(Enum):
    READY = "ready"
    LOST = "lost"
    """Dead, hung, failing or restarted; attempts are made to bring it back."""
    DEAD = "dead"
    """Dead, and nobody starts it again."""
    STALE = "stale"
    """An update failed, here or elsewhere, so the weights it holds may not be the pool's."""


class FailureRate:
    """The share of a replica's latest requests that failed.

    Each new request makes those before it count 1 % less, so that about the last 100 count. Requests still in flight
    are among them: a few failures among many begun at the same time are few.
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
        """Whether at least that share of the requests failed, and that many of them."""
        return self._failed > at_least - 0.5 and self._failed >= share * self._requests

    def __str__(self) -> str:
        return f"about {self._failed:.0f} of its last {self._requests:.0f} requests failed"


@dataclass(slots=True, eq=False)
class Member:
    """A replica in a pool. `samples` are those in flight on it, as the pool has followed them."""

    replica: Replica
    samples: dict[str, Sample] = field(default_factory=dict)
    failed: dict[str, tuple[Sample, Chunk]] = field(default_factory=dict)
    """Requests that failed here, until a health check shows whether the replica is the cause."""
    state: State = State.READY
    reason: str = ""
    """Why it is not ready."""
    supervisor: Supervisor = field(default_factory=lambda: Supervisor(RestartPolicy(REVIVAL_DELAY)))
    failures: FailureRate = field(default_factory=FailureRate)
    given: int = 0
    """Samples that it was given."""
    losses: int = 0
    """Times that it was lost."""
    pump: asyncio.Task[None] | None = None
    check: asyncio.Task[None] | None = None
    revival: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def place(self) -> str:
        """Where it works, for people; empty for one in this process."""
        return str(getattr(self.replica, "place", ""))

    @property
    def running(self) -> int:
        """Samples that decode."""
        return self.replica.running if self.ready else 0

    @property
    def slots(self) -> int:
        return self.replica.capacity.slots

    @property
    def load(self) -> float:
        """Samples in flight, as a share of what decodes together."""
        return len(self.samples) / self.replica.capacity.slots

    def become(self, state: State, reason: str = "") -> None:
        if state in (State.LOST, State.DEAD):
            where = f" at {self.place}" if self.place else ""
            log.warning("%s%s is %s: %s", self.name, where, state.value, reason)
            self.losses += state is State.LOST
        if state is State.READY:
            self.supervisor.running()
        elif state is State.DEAD:
            self.supervisor.give_up(reason)
        self.state, self.reason = state, reason
        self.failures = FailureRate()

    async def trouble(self, timeout: float) -> str | None:
        """What a health check finds wrong; None if all is well."""
        try:
            async with asyncio.timeout(timeout):
                await self.replica.check()
        except EngineError as error:
            return str(error)
        except TimeoutError:
            return f"no answer to a health check in {timeout:g} s"
        return None
