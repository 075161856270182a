"""Seeds of samples."""

from __future__ import annotations

import struct
from hashlib import shake_128


def sample_seeds(seed: int, group_id: int, n: int, evaluation: bool = False) -> list[int]:
    """Return the seeds of a group's samples: 64-bit hashes of the run's seed and the group's number.

    SHAKE-128 makes the seeds of any two samples independent. Training and evaluation have seeds of their own.
    """
    key = f"{'evaluation' if evaluation else 'training'} {seed} {group_id}"
    return list(struct.unpack(f"<{n}Q", shake_128(key.encode(), usedforsecurity=False).digest(8 * n)))


def branch_seed(seed: int, number: int) -> int:
    """Return the seed of the sample that begins with the turn `number` of the episode whose first sample has `seed`."""
    digest = shake_128(f"branch {seed} {number}".encode(), usedforsecurity=False).digest(8)
    return int.from_bytes(digest, "little")
