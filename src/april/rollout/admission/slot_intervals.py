"""Intervals in which samples hold slots of an engine, with decode steps as the clock.

Samples get slots first come, first served, as long as their KV cache fits, and gain one token per decode step. If the
cache has no room for another step, the sample that was admitted last is preempted: it returns to the front of the queue
and is prefilled again when it is admitted.

Invariants:
- at any time there are at most `slots` intervals, which hold at most `room` tokens unless there is only one;
- the intervals of a sample do not overlap, and add up to its whole work unless the clock stops before.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WATERMARK = 0.01
"""Share of the KV cache that engines leave free when they admit a sample."""
EXTENSION = 1.4
"""Factor by which the time covered is extended each time."""


class SlotIntervals(NamedTuple):
    """Columns of shape [intervals]; entry i below the number of samples is the first interval of sample i."""

    sample: NDArray[np.int64]
    start: Floats
    """inf for a sample that was never admitted."""
    stop: Floats
    had: Floats
    """Tokens that the sample gained in earlier intervals."""

    @classmethod
    def uninterrupted(cls, start: Floats, work: Floats) -> SlotIntervals:
        """Return one interval for each sample, without preemption."""
        return cls(np.arange(len(work)), start, start + work, np.zeros(len(work)))

    def complete(self, work: Floats) -> Floats:
        """Return the time at which each sample has gained all of its work, or inf; shape [samples]."""
        begun = self.start < inf
        gained = np.bincount(self.sample[begun], self.stop[begun] - self.start[begun], len(work))
        last = self.stop[: len(work)].copy()
        last[self.sample[len(work) :]] = self.stop[len(work) :]  # a sample's last interval counts
        return np.where(gained > work - 1e-6, last, inf)

    def peak(self, held: Floats, end: float) -> float:
        """Return the most tokens held at any time up to `end`, by samples that begin with `held` tokens."""
        begun = self.start < end
        start, stop = self.start[begun], np.minimum(self.stop[begun], end)
        base = held[self.sample[begun]] + self.had[begun] - start
        # Stops first, as the sort is stable: at equal times a sample leaves before the next one takes its slot.
        times, count = np.concatenate((stop, start)), np.repeat([-1.0, 1.0], len(start))
        order = np.argsort(times, kind="stable")
        level, running = np.cumsum((np.tile(base, 2) * count)[order]), np.cumsum(count[order])
        after = level + running * times[order]
        before = np.concatenate(([0.0], level[:-1] + running[:-1] * times[order][1:]))
        return float(np.maximum(before, after).max(initial=0.0))


def slot_starts(work: Floats, slots: int) -> Floats:
    """Return the time at which each sample gets a slot if all KV caches fit."""
    start = np.zeros(len(work))
    if len(work) > slots:
        free = work[:slots].tolist()
        heapq.heapify(free)
        waiting = []
        for tokens in work[slots:].tolist():
            waiting.append(free[0])
            heapq.heapreplace(free, free[0] + tokens)
        start[slots:] = waiting
    return start


def with_preemption(held: Floats, work: Floats, slots: int, room: float, until: float = inf) -> Iterator[SlotIntervals]:
    """Yield the intervals up to `until`, and then up to later and later times, if not all KV caches fit.

    Args:
        held: tokens of KV cache that each sample begins with, shape [samples].
        work: tokens that each sample has to gain, shape [samples].
        room: capacity of the KV cache, in tokens.
    """
    came, holds, left, fits = held.tolist(), held.tolist(), work.tolist(), room * (1 - WATERMARK)
    past: list[tuple[int, float, float, float]] = []
    running: dict[int, float] = {}  # start of each running sample, in the order of admission
    ends: list[tuple[float, float, int]] = []
    waiting = deque(range(len(left)))
    now = used = 0.0
    while True:
        # A sample that is alone is admitted even if it does not fit, or the simulation would never end.
        while waiting and len(running) < slots and (used + holds[waiting[0]] <= fits or not running):
            one = waiting.popleft()
            running[one] = now
            used += holds[one]
            heapq.heappush(ends, (now + left[one], now, one))
        while ends and running.get(ends[0][2]) != ends[0][1]:  # it was preempted since
            heapq.heappop(ends)
        full = now + max(room - used, 0.0) / len(running) if len(running) > 1 else inf
        end = min(ends[0][0], full) if running else inf
        if end > until or not running:
            yield _intervals(
                past + [(one, since, until, holds[one] - came[one]) for one, since in running.items()], work
            )
            until *= EXTENSION
            continue
        used += (end - now) * len(running)
        now = end
        if ends[0][0] <= now:
            one = heapq.heappop(ends)[2]
        else:
            one = next(reversed(running))
            waiting.appendleft(one)
        since = running.pop(one)
        past.append((one, since, now, holds[one] - came[one]))
        holds[one] += now - since
        left[one] -= now - since
        used -= holds[one]


def _intervals(past: list[tuple[int, float, float, float]], work: Floats) -> SlotIntervals:
    """Return the first intervals in the order of the samples, then the others in the order of time."""
    columns = np.array(past).reshape(-1, 4)
    sample = columns[:, 0].astype(np.int64)
    begun, first = np.unique(sample, return_index=True)
    start, stop = np.full((2, len(work)), inf)
    start[begun], stop[begun] = columns[first, 1], columns[first, 2]
    more = np.delete(columns, first, axis=0)
    return SlotIntervals(
        np.concatenate((np.arange(len(work)), np.delete(sample, first))),
        np.concatenate((start, more[:, 1])),
        np.concatenate((stop, more[:, 2])),
        np.concatenate((np.zeros(len(work)), more[:, 3])),
    )
