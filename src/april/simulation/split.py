"""How many of a cluster's GPUs should train, and how many generate, where both go on at the same time.

More engines make a batch sooner, and more trainers are done with it sooner; a step takes as long as the slower of the
two. So tokens trained on per second rise with the GPUs that train until the engines are the slower side, and fall from
there: a few splits of the whole range are tried, then a few around the best of them, as often as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

AT_A_TIME = 5
"""Splits of a range that are tried."""


class Split(NamedTuple):
    """What came of letting so many GPUs train, while the others generate."""

    training_gpus: int
    tokens_per_second: float
    """Trained on, over everything."""


def try_splits(gpus: int, least: int, measure: Callable[[int], float]) -> list[Split]:
    """The splits of `gpus` GPUs that were tried, those with few GPUs that train first; `best` takes one.

    Args:
        least: GPUs that the trainer needs at least.
        measure: tokens trained on per second when so many GPUs train.
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
        if around[1] - around[0] <= 2 or around == (low, high):
            return [Split(training, tried[training]) for training in order]
        low, high = around


def _evenly(low: int, high: int) -> list[int]:
    count = min(AT_A_TIME, high - low + 1)
    return [low + round(place * (high - low) / max(count - 1, 1)) for place in range(count)]


def best(splits: Sequence[Split]) -> Split:
    """The one that trains most; the fewest GPUs of several."""
    return max(splits, key=lambda split: (split.tokens_per_second, -split.training_gpus))
