"""The staleness bound, and the selection of the groups of a batch.

A group's staleness is the number of weight updates between its first token and the step that trains on it. With one
step per version and N groups per step, a group whose first token has version f must be trained on at version f + S or
before: its deadline. All groups can meet their deadlines exactly if, for every deadline d, at most N groups per version
from now until d are due by d (earliest deadline first is optimal). So a batch is taken as soon as N complete groups can
be taken, oldest first, such that the remaining groups have that property one version later.

Invariant: if the property holds before a step and at most N * (S + 1) groups are in the buffer, then some selection
keeps it once enough groups have finished. No sample is dropped, restarted or truncated to keep the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from april.rollout.trajectory.group import Group


class StalenessError(Exception):
    """A weight update or a batch would make it impossible to keep the staleness bound."""


def feasible(first_versions: Iterable[int], version: int, batch_size: int, max_staleness: int) -> bool:
    """Whether groups started at `first_versions` can all be trained on within the bound, `batch_size` per step.

    Args:
        first_versions: policy version of each group's first token.
        version: policy version of the next training step; each step after it is one version later.
    """
    started = 0
    for first, count in sorted(Counter(first_versions).items()):
        started += count
        # The steps from `version` to the deadline, both included, take `batch_size` groups each.
        if started > batch_size * (first + max_staleness - version + 1):
            return False
    return True


def age(group: Group) -> tuple[float, int]:
    """Sorting key, oldest first: by first version, then by admission; groups without a token come last."""
    first = group.first_version
    return (float("inf") if first is None else first, group.id)


def inside_window(buffered: Iterable[Group], ready: Iterable[Group], window: int) -> list[Group]:
    """Return the groups of `ready` that were admitted less than `window` groups after the oldest unfinished group.

    Among groups that started together, groups with short responses are complete first, so a step that takes complete
    groups trains on short responses first. A window makes them wait for the others: consumption follows the order of
    admission. The wait ends at the latest when every buffered group is complete, so the bound is kept.
    """
    unfinished = min((group.id for group in buffered if not group.complete), default=None)
    return [group for group in ready if unfinished is None or group.id < unfinished + window]


def select(
    buffered: Iterable[Group],
    ready: Collection[Group],
    version: int,
    batch_size: int,
    max_staleness: int | None,
    first_come: bool = False,
    admission_window: int | None = None,
) -> list[Group] | None:
    """Return the groups to train on at `version`: the oldest `batch_size` of `ready`; None if the step must wait.

    Args:
        buffered: every group in the buffer, including `ready`.
        ready: the groups that may be trained on, in the order in which they became so.
        max_staleness: the bound in versions; None for no bound.
        first_come: take the groups that were ready first instead of the oldest groups; only without a bound.
        admission_window: see `inside_window`; None for no window.
    """
    if admission_window is not None:
        buffered = list(buffered)
        ready = inside_window(buffered, ready, admission_window)
    if len(ready) < batch_size:
        return None
    chosen = (list(ready) if first_come else sorted(ready, key=age))[:batch_size]
    if max_staleness is None:
        return chosen
    taken = {group.id for group in chosen}
    rest = [group for group in buffered if group.id not in taken]
    # A group without a token has no deadline yet; `RolloutLoop.target` leaves steps for it.
    first_versions = [first for group in rest if (first := group.first_version) is not None]
    return chosen if feasible(first_versions, version + 1, batch_size, max_staleness) else None
