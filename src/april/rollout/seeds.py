"""The seeds of samples: those of `numpy.random.SeedSequence`, of many groups at a time.

NumPy's own takes one group after the other, 7 µs each. The algorithm is seed_seq_fe of M. E. O'Neill (2015), which
NumPy keeps stable across releases: 32-bit words are hashed into a pool of four, and the pool into as many as are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

BLOCK = 256
"""Groups whose seeds are made together."""
POOL = 4


def seeds(seed: int, group_id: int, n: int, *more: int) -> list[int]:
    """`SeedSequence((seed, group_id, *more)).generate_state(n, np.uint64)`, as numbers.

    Raises:
        ValueError: a number is negative, or `group_id` is 2**32 or more.
    """
    if min(seed, group_id, *more) < 0 or group_id >= 1 << 32:
        raise ValueError(f"seed {seed}, group {group_id}: must not be negative, and the group below 2**32")
    block, place = divmod(group_id, BLOCK)
    return _block(seed, block, n, more)[place]


@lru_cache(maxsize=4)
def _block(seed: int, block: int, n: int, more: tuple[int, ...]) -> list[list[int]]:
    ids = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint32)
    words = [*_words(seed), ids, *(word for number in more for word in _words(number))]
    pool = _pooled([np.broadcast_to(word, ids.shape) for word in words])
    hashed = _hash(0x8B51F9DD, 0x58F38DED)
    out = np.stack([hashed(pool[i % POOL]) for i in range(2 * n)], axis=1).astype(np.uint64)
    made: list[list[int]] = (out[:, ::2] | out[:, 1::2] << np.uint64(32)).tolist()
    return made


def _words(number: int) -> list[Words]:
    """A number as 32-bit words, the lowest first."""
    count = max(1, -(-number.bit_length() // 32))
    return [np.uint32(number >> 32 * i & 0xFFFFFFFF) for i in range(count)]  # type: ignore[misc]


def _pooled(words: list[Words]) -> list[Words]:
    hashed = _hash(0x43B0D7E5, 0x931E8875)
    pool = [hashed(words[i] if i < len(words) else np.zeros_like(words[0])) for i in range(POOL)]
    for i in range(POOL):
        for j in range(POOL):
            if i != j:
                pool[j] = _mixed(pool[j], hashed(pool[i]))
    for word in words[POOL:]:
        for j in range(POOL):
            pool[j] = _mixed(pool[j], hashed(word))
    return pool


def _hash(constant: int, factor: int) -> Callable[[Words], Words]:
    """A hash whose constant changes with every call."""

    def hashed(words: Words) -> Words:
        nonlocal constant
        before, constant = constant, constant * factor & 0xFFFFFFFF
        words = (words ^ np.uint32(before)) * np.uint32(constant)
        return words ^ words >> np.uint32(16)

    return hashed


def _mixed(x: Words, y: Words) -> Words:
    mixed: Words = x * np.uint32(0xCA01F9DD) - y * np.uint32(0x4973F715)
    mixed ^= mixed >> np.uint32(16)
    return mixed
