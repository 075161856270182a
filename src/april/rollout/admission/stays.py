"""Who decodes when, with decode steps for a clock: what an engine with so many slots and so large a KV cache does.

Samples get slots first come, first served, as long as their KV cache fits; one more token each per decode step; where
the cache has no room for another step, the one that came in last gives way, goes back to the front of the queue and is
prefilled again when it gets its turn.

Invariants:
- never more than `slots` stays at once; nor do they hold more than `room` tokens, unless one alone does;
- the stays of a sample do not overlap, and come to its whole work unless the clock was stopped before.
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
FURTHER = 1.4
"""How much further stays go each time."""


class Stays(NamedTuple):
    """Each shape [stays], the first `samples` of them the first stays of the samples in their order."""

    sample: NDArray[np.int64]
    start: Floats
    """inf for a sample that did not get its turn."""
    stop: Floats
    had: Floats
    """Tokens that the sample gained in its earlier stays."""

    @classmethod
    def whole(cls, start: Floats, work: Floats) -> Stays:
        """Nobody is preempted."""
        return cls(np.arange(len(work)), start, start + work, np.zeros(len(work)))

    def complete(self, work: Floats) -> Floats:
        """When each sample has gained all of its work; inf if it did not. Shape [samples]."""
        begun = self.start < inf
        gained = np.bincount(self.sample[begun], self.stop[begun] - self.start[begun], len(work))
        last = self.stop[: len(work)].copy()
        last[self.sample[len(work) :]] = self.stop[len(work) :]  # the last of a sample's stays counts
        return np.where(gained > work - 1e-6, last, inf)

    def peak(self, held: Floats, end: float) -> float:
        """The most tokens held at any time up to `end`, by samples that came with so many."""
        begun = self.start < end
        start, stop = self.start[begun], np.minimum(self.stop[begun], end)
        base = held[self.sample[begun]] + self.had[begun] - start
        times, count = np.concatenate((stop, start)), np.repeat([-1.0, 1.0], len(start))
        order = np.argsort(times, kind="stable")
        level, running = np.cumsum((np.tile(base, 2) * count)[order]), np.cumsum(count[order])
        after = level + running * times[order]
        before = np.concatenate(([0.0], level[:-1] + running[:-1] * times[order][1:]))
        return float(np.maximum(before, after).max(initial=0.0))


def queue(work: Floats, slots: int) -> Floats:
    """When each sample gets its slot where every KV cache fits."""
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


def crowd(held: Floats, work: Floats, slots: int, room: float, until: float = inf) -> Iterator[Stays]:
    """Stays where not every KV cache fits: those up to `until`, and then, as often as asked, further and further.

    Args:
        held: tokens of KV cache that each sample comes with, shape [samples].
        work: tokens that each has to gain, shape [samples].
        room: tokens of KV cache that fit.
    """
    came, holds, left, fits = held.tolist(), held.tolist(), work.tolist(), room * (1 - WATERMARK)
    past: list[tuple[int, float, float, float]] = []
    running: dict[int, float] = {}  # who runs and since when, in the order in which they came in
    ends: list[tuple[float, float, int]] = []
    waiting = deque(range(len(left)))
    now = used = 0.0
    while True:
        while waiting and len(running) < slots and (used + holds[waiting[0]] <= fits or not running):
            one = waiting.popleft()
            running[one] = now
            used += holds[one]
            heapq.heappush(ends, (now + left[one], now, one))
        while ends and running.get(ends[0][2]) != ends[0][1]:  # it was preempted meanwhile
            heapq.heappop(ends)
        full = now + max(room - used, 0.0) / len(running) if len(running) > 1 else inf
        end = min(ends[0][0], full) if running else inf
        if end > until or not running:
            yield _stays(past + [(one, since, until, holds[one] - came[one]) for one, since in running.items()], work)
            until *= FURTHER
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


def _stays(past: list[tuple[int, float, float, float]], work: Floats) -> Stays:
    """First stays in the order of the samples, then the others in that of time."""
    columns = np.array(past).reshape(-1, 4)
    sample = columns[:, 0].astype(np.int64)
    begun, first = np.unique(sample, return_index=True)
    start, stop = np.full((2, len(work)), inf)
    start[begun], stop[begun] = columns[first, 1], columns[first, 2]
    more = np.delete(columns, first, axis=0)
    return Stays(
        np.concatenate((np.arange(len(work)), np.delete(sample, first))),
        np.concatenate((start, more[:, 1])),
        np.concatenate((stop, more[:, 2])),
        np.concatenate((np.zeros(len(work)), more[:, 3])),
    )
