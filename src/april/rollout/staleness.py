"""The staleness bound, and the one place that decides when a step is complete.

A group's staleness is the number of weight updates between its first token and the step that trains on it. With a step
a version and N groups a step, a group whose first token came from version f must be trained on at version f + S or
before: its deadline. Groups can all meet their deadlines exactly if, for every deadline d, at most N groups per version
from now until d are due by d (earliest deadline first is optimal). So a step is complete when N complete groups can be
taken, oldest first, such that what remains keeps that property one version later.

Invariant: if it holds before a step and at most N * (S + 1) groups are under way, then some selection keeps it once
enough groups have finished. The bound is never kept by dropping, restarting or truncating a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from april.rollout.trajectory import Group


class StalenessError(Exception):
    """A weight update that would make it impossible to keep the staleness bound."""


def feasible(first_versions: Iterable[int], version: int, batch_size: int, max_staleness: int) -> bool:
    """Whether groups begun at `first_versions` can all be trained on within the bound, `batch_size` a step.

    Args:
        first_versions: policy version of each group's first token.
        version: policy version of the next training step; each step after it is one version later.
    """
    begun = 0
    for first, count in sorted(Counter(first_versions).items()):
        begun += count
        if begun > batch_size * (first + max_staleness - version + 1):
            return False
    return True


def age(group: Group) -> tuple[float, int]:
    """Sorting key, oldest first: by first version, then by admission; groups without a token come last."""
    first = group.first_version
    return (float("inf") if first is None else first, group.id)


def inside_window(under_way: Iterable[Group], ready: Iterable[Group], window: int) -> list[Group]:
    """Those of `ready` that were admitted less than `window` groups after the oldest unfinished one.

    Among groups that began together the quick ones are complete first, so a step that takes what is complete trains on
    short responses first. A window makes them wait for the slow ones: consumption follows the order of admission. It
    only ever waits, and for nothing once everything under way is complete, so the bound is kept with it.
    """
    unfinished = min((group.id for group in under_way if not group.complete), default=None)
    return [group for group in ready if unfinished is None or group.id < unfinished + window]


def select(
    under_way: Iterable[Group],
    ready: Collection[Group],
    version: int,
    batch_size: int,
    max_staleness: int | None,
    first_come: bool = False,
    admission_window: int | None = None,
) -> list[Group] | None:
    """The groups to train on at `version`: the oldest `batch_size` of `ready`, or None if the step must wait.

    Args:
        under_way: every group that was admitted and not yet trained on, those of `ready` included.
        ready: the groups that may be trained on, in the order in which they became so.
        max_staleness: the bound in versions; None for no bound.
        first_come: take the groups that were ready first instead of the oldest; only without a bound.
        admission_window: see `inside_window`; None for no window.
    """
    if admission_window is not None:
        under_way = list(under_way)
        ready = inside_window(under_way, ready, admission_window)
    if len(ready) < batch_size:
        return None
    chosen = (list(ready) if first_come else sorted(ready, key=age))[:batch_size]
    if max_staleness is None:
        return chosen
    taken = {group.id for group in chosen}
    rest = [group for group in under_way if group.id not in taken]
    begun = [first for group in rest if (first := group.first_version) is not None]
    return chosen if feasible(begun, version + 1, batch_size, max_staleness) else None
