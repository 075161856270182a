from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from april import FinishReason, Group, Prompt, SamplingParams
from april.rollout.staleness import age, feasible, inside_window, select


def brute_force(first_versions: list[int], version: int, batch_size: int, max_staleness: int) -> bool:
    """Whether some order of the groups trains on each in time, tried one by one."""
    return any(
        all(version + place // batch_size - first <= max_staleness for place, first in enumerate(order))
        for order in itertools.permutations(first_versions)
    )


@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 8), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_feasible_agrees_with_trying_every_order(
    first_versions: list[int], version: int, batch_size: int, max_staleness: int
) -> None:
    expected = brute_force(first_versions, version, batch_size, max_staleness)
    assert feasible(first_versions, version, batch_size, max_staleness) == expected


def group(id: int, first_version: int | None) -> Group:
    made = Group.start(id, Prompt((1,)), 1, SamplingParams(), seed=0)
    if first_version is not None:
        made.samples[0].extend([5], [-1.0], first_version)
    return made


def test_the_oldest_groups_come_first_and_groups_without_a_token_last() -> None:
    groups = [group(0, None), group(1, 2), group(2, 1), group(3, 2)]
    assert [g.id for g in sorted(groups, key=age)] == [2, 1, 3, 0]


def test_a_step_waits_for_a_group_that_would_grow_too_old() -> None:
    old, *fresh = group(0, 0), group(1, 2), group(2, 2)
    everything = [old, *fresh]
    assert select(everything, fresh, 2, 2, max_staleness=2) is None, "group 0 could not be trained on in time"
    assert select(everything, everything, 2, 2, max_staleness=2) == [old, fresh[0]]
    assert select(everything, fresh, 2, 2, max_staleness=3) == fresh
    assert select(everything, fresh, 2, 2, max_staleness=None) == fresh


def test_selection_considers_all_future_steps_within_the_bound() -> None:
    """Three groups of version 0 and one slot a step: with a bound of 3 the first must leave at version 1 already."""
    old = [group(i, 0) for i in range(3)]
    fresh = group(9, 1)
    assert select([*old, fresh], [fresh], 1, 1, max_staleness=3) is None
    assert select([*old, fresh], [fresh, old[0]], 1, 1, max_staleness=3) == [old[0]]


def test_the_admission_window_holds_back_quick_groups() -> None:
    slow, *quick = [group(i, 0) for i in range(5)]
    for made in quick:
        made.samples[0].extend([6], [-1.0], 0, FinishReason.STOP)
    everything = [slow, *quick]
    assert [g.id for g in inside_window(everything, quick, 3)] == [1, 2]
    assert select(everything, quick, 0, 2, None, admission_window=3) == quick[:2]
    assert select(everything, quick, 0, 3, None, admission_window=3) is None, "it waits"
    assert inside_window(quick, quick, 1) == quick, "nothing is unfinished, so nothing waits"


def test_a_window_of_one_is_the_order_of_admission() -> None:
    first, second, third = (group(i, 0) for i in range(3))
    for made in (first, third):
        made.samples[0].extend([6], [-1.0], 0, FinishReason.STOP)
    assert inside_window([first, second, third], [first, third], 1) == [first]
