"""Uniform random numbers of a sample.

Invariant: number i is a function of (seed, i) alone, i being the index of the response token that it draws.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 64
_WORDS_PER_COUNTER = 4


class UniformStream:
    """Uniform numbers in [0, 1) of the stream that `seed` names, from number `start` on.

    Philox-4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the counter is the index, so the
    stream can be entered anywhere.
    """

    __slots__ = ("_generator", "_numbers", "_used")

    def __init__(self, seed: int, start: int = 0) -> None:
        counter, skipped = divmod(start, _WORDS_PER_COUNTER)
        self._generator = np.random.Generator(np.random.Philox(key=seed & (2**128 - 1), counter=counter))
        self._generator.random(skipped)
        self._numbers: list[float] = []
        self._used = 0

    def peek(self, count: int) -> list[float]:
        """Return the next `count` numbers without consuming them, so that a failed forward pass can be repeated."""
        if self._used + count > len(self._numbers):
            fresh: list[float] = self._generator.random(max(_BLOCK, count)).tolist()
            self._numbers = self._numbers[self._used :] + fresh
            self._used = 0
        return self._numbers[self._used : self._used + count]

    def skip(self, count: int) -> None:
        """Consume `count` numbers, all of which were peeked at."""
        self._used += count
