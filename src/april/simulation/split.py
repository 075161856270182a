"""Search for the best division of a cluster's GPUs between training and generation, if the two overlap.

More engines generate a batch sooner, and more trainers finish with it sooner; the slower of the two determines the
duration of a step. So consumed tokens per second rise with the number of GPUs that train until the engines become the
slower side, and then fall. The search tries a few splits of the whole range, then repeatedly a few around the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

AT_A_TIME = 5
"""Splits tried in each range."""


class Split(NamedTuple):
    """Result of letting `training_gpus` GPUs train while the others generate."""

    training_gpus: int
    tokens_per_second: float
    """Consumed tokens, over the whole time."""


def try_splits(gpus: int, least: int, measure: Callable[[int], float]) -> list[Split]:
    """Return the tried splits of `gpus` GPUs, in the order of their training GPUs; `best` selects one.

    Args:
        least: minimum number of GPUs of the trainer.
        measure: returns consumed tokens per second for a number of training GPUs.
    """
    tried: dict[int, float] = {}
    low, high = least, gpus - 1
    while True:
        for training in _evenly(low, high):
            if training not in tried:
                tried[training] = measure(training)
        order = sorted(tried)
        place = order.index(max(order, key=lambda training: tried[training]))
        around = order[max(place - 1, 0)], order[min(place + 1, len(order) - 1)]
        # At most one split next to the best is untried, or the range no longer shrinks.
        if around[1] - around[0] <= 2 or around == (low, high):
            return [Split(training, tried[training]) for training in order]
        low, high = around


def _evenly(low: int, high: int) -> list[int]:
    count = min(AT_A_TIME, high - low + 1)
    return [low + round(place * (high - low) / max(count - 1, 1)) for place in range(count)]


def best(splits: Sequence[Split]) -> Split:
    """Return the split with the highest rate; of several, that with the fewest training GPUs."""
    return max(splits, key=lambda split: (split.tokens_per_second, -split.training_gpus))
