"""Randomness of its own for code that draws from Python's and NumPy's process-wide generators.

Invariant: draws inside `with own:` depend on its seed alone, however many other blocks draw concurrently, and leave
the process's own generators as they were.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np

_one = threading.RLock()
"""Held by the block that uses the process-wide generators."""


class OwnRandom:
    """A seed's place in the process-wide generators; one block at a time has them."""

    def __init__(self, seed: int) -> None:
        self._state: tuple[Any, Any] = (random.Random(seed).getstate(), _numpy_state(seed))
        self._before: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        _one.acquire()
        self._before = random.getstate(), np.random.get_state()
        random.setstate(self._state[0])
        np.random.set_state(self._state[1])

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        self._state = random.getstate(), np.random.get_state()
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])
        _one.release()


def _numpy_state(seed: int) -> Any:
    return np.random.RandomState(seed % (1 << 32)).get_state()
