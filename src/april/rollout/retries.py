"""Requests to an engine that failed: how often in a row, and when their samples go on.

Invariants:
- a sample is submitted again at most `limit` times in a row without a token between; then it is given up;
- it waits `delay` seconds after the first failure and twice as long after each further one, at most `LONGEST`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from april.rollout.trajectory import Sample

LONGEST = 30.0
"""Seconds between two attempts at most."""


class Retries:
    """The samples whose last request failed.

    `len` counts those that wait for another attempt, and `in` says whether a sample is one of them.

    Args:
        limit: failures in a row, without a token between them, that a sample may have.
        delay: seconds until the second attempt.
    """

    def __init__(self, limit: int, delay: float) -> None:
        self.limit = limit
        self.delay = delay
        self.failures: dict[str, int] = {}
        """In a row, by sample."""
        self._waiting: dict[str, tuple[float, Sample]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self._waiting

    def failed(self, sample: Sample) -> bool:
        """A request of `sample` failed. False if it has failed too often and is not tried again."""
        failures = self.failures[sample.id] = self.failures.get(sample.id, 0) + 1
        if failures > self.limit:
            del self.failures[sample.id]
            return False
        wait = min(self.delay * 2 ** (failures - 1), LONGEST)
        self._waiting[sample.id] = (asyncio.get_running_loop().time() + wait, sample)
        return True

    def went_on(self, sample_ids: Iterable[str]) -> None:
        """Tokens came: what failed before no longer counts."""
        if self.failures:
            for id in sample_ids:
                self.failures.pop(id, None)

    def forget(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.failures.pop(sample.id, None)
            self._waiting.pop(sample.id, None)

    def due(self) -> list[Sample]:
        """The samples whose wait is over; they wait no longer."""
        now = asyncio.get_running_loop().time()
        samples = [sample for when, sample in self._waiting.values() if when <= now]
        for sample in samples:
            del self._waiting[sample.id]
        return samples

    def clear(self) -> None:
        """Nobody waits any longer: a new step begins."""
        self._waiting.clear()

    @property
    def next(self) -> float | None:
        """Seconds until a sample is due; None if none waits."""
        if not self._waiting:
            return None
        return max(0.0, min(when for when, _ in self._waiting.values()) - asyncio.get_running_loop().time())
