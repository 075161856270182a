from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from april.rollout.admission.slot_intervals import SlotIntervals, slot_starts, with_preemption

SAMPLES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=30)


def arrays(samples: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    held, work = np.array(samples, dtype=float).T
    return held, work


@given(SAMPLES, st.integers(1, 12), st.integers(100, 400))
@settings(max_examples=150, deadline=None)
def test_everyone_gains_their_work_within_slots_and_room(samples: list[tuple[int, int]], slots: int, room: int) -> None:
    held, work = arrays(samples)
    intervals = next(with_preemption(held, work, slots, room))
    assert np.allclose(np.bincount(intervals.sample, intervals.stop - intervals.start), work)
    assert (intervals.complete(work) < inf).all()
    for sample in range(len(work)):
        own = sorted(
            (a, b) for s, a, b in zip(intervals.sample, intervals.start, intervals.stop, strict=True) if s == sample
        )
        assert all(one[1] <= next_one[0] for one, next_one in pairwise(own)), "one stay at a time"
    for at in np.unique(np.concatenate((intervals.start, intervals.stop))) + 1e-7:
        runs = (intervals.start < at) & (at < intervals.stop)
        holds = (held[intervals.sample] + intervals.had + at - intervals.start)[runs].sum()
        assert runs.sum() <= slots
        assert holds <= room + 1e-3
    assert intervals.peak(held, inf) <= room + 1e-6


@given(SAMPLES, st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_with_room_for_all_it_is_first_come_first_served(samples: list[tuple[int, int]], slots: int) -> None:
    held, work = arrays(samples)
    whole, intervals = (
        SlotIntervals.uninterrupted(slot_starts(work, slots), work),
        next(with_preemption(held, work, slots, 1e9)),
    )
    assert np.allclose(intervals.start, whole.start)
    assert np.allclose(intervals.stop, whole.stop)


@given(SAMPLES, st.integers(1, 12), st.integers(100, 400), st.floats(1, 100))
@settings(max_examples=50, deadline=None)
def test_what_is_seen_up_to_a_time_is_what_is_seen_of_it_later(
    samples: list[tuple[int, int]], slots: int, room: int, until: float
) -> None:
    held, work = arrays(samples)
    whole = next(with_preemption(held, work, slots, room))
    further = with_preemption(held, work, slots, room, until)
    for _ in range(3):
        part = next(further)
        last = part.stop[part.stop < inf].max()
        for intervals in (part, whole):
            gained = np.maximum(np.minimum(intervals.stop, last) - intervals.start, 0.0)
            assert np.isclose(gained.sum(), (np.minimum(part.stop, last) - part.start)[part.start < inf].sum())


def test_the_last_one_in_gives_way_and_comes_back_first() -> None:
    """Two samples of 40 tokens, room for 60: at 10 tokens each the second gives way, until the first is done."""
    intervals = next(with_preemption(np.array([20.0, 20.0]), np.array([20.0, 20.0]), 2, 60.0))
    assert intervals.sample.tolist() == [0, 1, 1]
    assert intervals.start.tolist() == [0, 0, 20]
    assert intervals.stop.tolist() == [20, 10, 30]
    assert intervals.had.tolist() == [0, 0, 10]
