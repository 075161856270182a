"""Whether the write-ahead log of an SQLite file is whole.

Invariant: a log that a crash left is accepted, whatever it cut off; one that was damaged before its end is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class LogDamage(Exception):
    """A log that is damaged; the message names it."""


def check_log(path: Path) -> None:
    """Refuse a write-ahead log that is damaged before its end. SQLite would leave out the rest and say nothing.

    Every transaction is on disk before the next begins, so a crash makes at most the last one unreadable: with two that
    are behind the first unreadable frame, it was no crash. The format is documented at
    sqlite.org/fileformat2.html#the_write_ahead_log.
    """
    log = Path(f"{path}-wal")
    data = log.read_bytes() if log.exists() else b""
    if len(data) < 56:  # no frame: what a crash leaves of a log that is begun
        return
    order = ">u4" if data[3] & 1 else "<u4"
    page, seed = int.from_bytes(data[8:12], "big"), np.frombuffer(data[24:32], ">u4").tolist()
    if _log_checksums(np.frombuffer(data[:24], order)[None], 0, 0) != [tuple(seed)]:
        raise LogDamage(f"{log}: damaged: the checksum of its header is not the one written with it")
    count = (len(data) - 32) // (24 + page)
    frames = np.frombuffer(data, np.uint8, count * (24 + page), 32).reshape(count, 24 + page)
    fields = np.ascontiguousarray(frames[:, :24]).view(">u4")
    current = (frames[:, 8:16] == np.frombuffer(data[16:24], np.uint8)).all(1)  # others are of an earlier log
    commits = (fields[:, 1] > 0) & current
    sums = _log_checksums(np.ascontiguousarray(np.delete(frames, np.s_[8:24], 1)).view(order), *seed)
    whole = [found == tuple(field[4:].tolist()) for found, field in zip(sums, fields, strict=True)]
    readable = next((i for i in range(count) if not (whole[i] and current[i])), count)
    if commits[readable:].sum() > 1:
        raise LogDamage(
            f"{log}: damaged before its end: of {commits.sum()} writes {commits[:readable].sum()} can be read"
        )


def _log_checksums(rows: NDArray[np.uint32], first: int, second: int) -> list[tuple[int, int]]:
    """The running checksum of a write-ahead log after each row of an even number of words.

    A pair of words (x, y) makes (s, t) into (s + x + t, t + y + s + x + t), modulo 2^32: a linear recurrence, so that a
    row's share is a product with Fibonacci numbers.
    """
    pairs = rows.shape[1] // 2
    weights = np.zeros((2, pairs, 2), np.uint64)
    a, b = 1, 1  # what one unit of x, then of y, has become at the end of the row
    c, d = 0, 1
    for i in reversed(range(pairs)):
        weights[:, i] = [[a, c], [b, d]]
        a, b, c, d = (x & 0xFFFFFFFF for x in (a + b, a + 2 * b, c + d, c + 2 * d))
    shares = rows.astype(np.uint64) @ weights.reshape(2, -1).T & np.uint64(0xFFFFFFFF)
    # The same recurrence on (s, t) alone: after n pairs, the matrix [[1, 1], [1, 2]] to the n-th power.
    p, q, r = 1, 0, 1
    for _ in range(pairs):
        p, q, r = (x & 0xFFFFFFFF for x in (p + q, q + r, q + 2 * r))
    sums = []
    for x, y in shares.tolist():
        first, second = (p * first + q * second + x) & 0xFFFFFFFF, (q * first + r * second + y) & 0xFFFFFFFF
        sums.append((first, second))
    return sums
