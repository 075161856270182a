"""Samples that wait on each replica."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SIZE = 16


class WaitingQueues:
    """A ring buffer of rows for each replica, so that a preempted sample can return to the front.

    Args:
        replicas: number of queues.
        spare: rows that may be put at the front of each queue.

    Attributes:
        counts: rows in each queue, [replicas].
    """

    def __init__(self, replicas: int, spare: int) -> None:
        self.counts = np.zeros(replicas, np.int64)
        self._spare = spare
        self._rows = np.full((replicas, _SIZE), -1, np.int64)
        self._heads = np.zeros(replicas, np.int64)

    def clear(self) -> None:
        self.counts.fill(0)
        self._heads.fill(0)

    def rows(self, replica: int) -> NDArray[np.int64]:
        """Return the rows that wait on a replica, the next one first."""
        places = (self._heads[replica] + np.arange(self.counts[replica])) % self._rows.shape[1]
        rows: NDArray[np.int64] = self._rows[replica, places]
        return rows

    def replace(self, replica: int, rows: NDArray[np.int64]) -> None:
        """Replace a queue by some of its rows."""
        places = (self._heads[replica] + np.arange(len(rows))) % self._rows.shape[1]
        self._rows[replica, places] = rows
        self.counts[replica] = len(rows)

    def first(self, replicas: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the next `count` rows of each of `replicas`, [replicas, count]; those behind the queue's end are
        undefined."""
        places = (self._heads[replicas, None] + np.arange(count)) % self._rows.shape[1]
        rows: NDArray[np.int64] = self._rows[replicas[:, None], places]
        return rows

    def append(self, rows: NDArray[np.int64], replica: NDArray[np.int64]) -> None:
        """Put each of `rows` at the end of the queue of its replica."""
        order = np.argsort(replica, kind="stable")
        rows, replica = rows[order], replica[order]
        added = np.bincount(replica, minlength=len(self.counts))
        self._make_room(int((self.counts + added).max()) + self._spare)
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(added) - added, added)
        self._rows[replica, ((self._heads + self.counts)[replica] + rank) % self._rows.shape[1]] = rows
        self.counts += added

    def push_front(self, rows: NDArray[np.int64], replicas: NDArray[np.int64]) -> None:
        """Put one row at the front of the queue of each of `replicas`."""
        self._heads[replicas] = (self._heads[replicas] - 1) % self._rows.shape[1]
        self._rows[replicas, self._heads[replicas]] = rows
        self.counts[replicas] += 1

    def pop(self, replicas: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Remove the first `counts[i]` rows of the queue of `replicas[i]`."""
        self._heads[replicas] = (self._heads[replicas] + counts) % self._rows.shape[1]
        self.counts[replicas] -= counts

    def _make_room(self, needed: int) -> None:
        size = self._rows.shape[1]
        if needed > size:
            grown = np.full((len(self.counts), 2 * needed), -1, np.int64)
            # Rings are unrolled: their wrap-around depends on the size, so all heads restart at 0.
            places = (self._heads[:, None] + np.arange(size)) % size
            grown[:, :size] = np.take_along_axis(self._rows, places, axis=1)
            self._rows = grown
            self._heads.fill(0)
