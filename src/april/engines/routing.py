"""Routing of samples to replicas.

A new sample goes to the replica with the least load, as a share of its slots; a resumed one to its home, where its
prefix may be cached, unless that is busier by more than `affinity`; one whose request failed to another replica if
there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class Loaded(Protocol):
    @property
    def load(self) -> float:
        """Samples in flight, as a share of what decodes together."""
        ...


R = TypeVar("R", bound=Loaded)


class Router(Generic[R]):
    """Chooses a replica for each sample.

    Args:
        affinity: how much more load a sample's home may have than the least loaded replica.
    """

    def __init__(self, affinity: float) -> None:
        self._affinity = affinity
        self._home: dict[str, R] = {}
        self._failed: dict[str, R] = {}

    def choose(self, sample_id: str, ready: Sequence[R]) -> R | None:
        """Return the replica for a sample; None if none is ready."""
        failed = self._failed.get(sample_id)
        candidates = [replica for replica in ready if replica is not failed] or list(ready)
        if not candidates:
            return None
        best = min(candidates, key=lambda replica: replica.load)
        home = self._home.get(sample_id)
        return home if home in candidates and home.load <= best.load + self._affinity else best

    def place(self, sample_id: str, replica: R) -> R | None:
        """Record that a sample is on `replica`. Return the home that it has left, if any."""
        home = self._home.get(sample_id)
        self._home[sample_id] = replica
        return home if home is not replica else None

    def request_failed(self, sample_id: str, replica: R) -> None:
        """Record that a request of the sample failed on `replica`."""
        self._failed[sample_id] = replica

    def token_arrived(self, sample_id: str) -> None:
        """Record that a token arrived: earlier failures of the sample no longer count."""
        if self._failed:
            self._failed.pop(sample_id, None)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Forget samples, all if none are named."""
        if sample_ids is None:
            self._home.clear()
            self._failed.clear()
            return
        for sample_id in sample_ids:
            self._home.pop(sample_id, None)
            self._failed.pop(sample_id, None)

    def forget_homes(self) -> None:
        """Forget all homes: no prefix is cached any more."""
        self._home.clear()
