"""Groups that are left out because of a fault, until they can be rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from april.rollout.batch import Quarantine
from april.rollout.buffer import Rejection
from april.rollout.generation.in_flight import InFlight
from april.rollout.trajectory.group import Group


class Quarantined:
    """Groups that are rejected as soon as none of their samples is in flight.

    Args:
        stop_work: ends retries and reward computations of a group that is added.
    """

    def __init__(self, stop_work: Callable[[Group], None]) -> None:
        self._groups: dict[int, tuple[Group, Quarantine]] = {}
        self._stop_work = stop_work

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def add(self, group: Group, reason: Rejection, error: str) -> None:
        """Leave a group out; the first reason stays."""
        self._groups.setdefault(group.id, (group, Quarantine(group.id, group.prompt.id, reason, error)))
        self._stop_work(group)

    def release(self, in_flight: InFlight) -> Iterator[tuple[Group, Quarantine]]:
        """Yield the groups of which nothing is in flight any more; each is removed as it is yielded."""
        for id, (group, _) in list(self._groups.items()):
            if not any(sample in in_flight for sample in group.samples):
                yield self._groups.pop(id)
