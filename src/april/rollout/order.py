"""Which samples go first: what is unfinished is handed to the engine in this order, and waits for a slot in it.

Invariant: an order decides when a sample runs and nothing else. Each order contains every unfinished sample of the
groups it is given exactly once, and the staleness bound holds whatever the order (`april.rollout.staleness`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from april.rollout.admission.lengths import LengthModel
from april.rollout.trajectory import Group, Sample

Order = Callable[[Sequence[Group], LengthModel], list[Sample]]


def unfinished(groups: Iterable[Group]) -> list[Sample]:
    """Every unfinished sample, in the order of the groups."""
    return [sample for group in groups for sample in group.samples if sample.finish is None]


def oldest(groups: Sequence[Group], lengths: LengthModel) -> list[Sample]:
    """In the order of admission: what was begun first goes first."""
    return unfinished(groups)


def most_complete(groups: Sequence[Group], lengths: LengthModel) -> list[Sample]:
    """Groups with the fewest unfinished samples first."""
    return unfinished(sorted(groups, key=lambda group: sum(sample.finish is None for sample in group.samples)))


def nearest(groups: Sequence[Group], lengths: LengthModel) -> list[Sample]:
    """Groups first that are expected to be complete first: by the longest expected remainder of their samples."""
    return unfinished(sorted(groups, key=lambda group: float(lengths.remaining(group).max(initial=0.0))))


def longest(groups: Sequence[Group], lengths: LengthModel) -> list[Sample]:
    """Samples with the longest expected remainder first, within and across groups."""
    return _by_remainder(groups, lengths, -1.0)


def shortest(groups: Sequence[Group], lengths: LengthModel) -> list[Sample]:
    """Samples with the shortest expected remainder first, within and across groups."""
    return _by_remainder(groups, lengths, 1.0)


def _by_remainder(groups: Sequence[Group], lengths: LengthModel, sign: float) -> list[Sample]:
    expected = {
        sample.id: sign * remaining
        for group in groups
        for sample, remaining in zip(group.samples, lengths.remaining(group), strict=True)
    }
    return sorted(unfinished(groups), key=lambda sample: expected[sample.id])


ORDERS: dict[str, Order] = {
    "oldest": oldest,
    "most-complete": most_complete,
    "nearest": nearest,
    "longest": longest,
    "shortest": shortest,
}
