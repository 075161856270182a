"""Two arms compared seed by seed: differences, an exact test, and its correction for many comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from analysis import bootstrap, final_accuracy

Record = Mapping[str, Any]
Runs = Mapping[int, Record]
"""By seed."""


def runs_of(records: Sequence[Record], seeds: Sequence[int], **values: Any) -> Runs:
    """The runs with these seeds and these values."""
    return {r["seed"]: r for r in records if r["seed"] in seeds and all(r[k] == v for k, v in values.items())}


def mean_accuracy(runs: Runs) -> float:
    return float(np.mean([final_accuracy(r) for r in runs.values()]))


def paired(ours: Runs, others: Runs, of: Callable[[Record], float | None]) -> list[tuple[float, float]]:
    """(other, ours) of each seed that both have, and that has a value in both."""
    both = [(of(others[seed]), of(ours[seed])) for seed in sorted(ours.keys() & others.keys())]
    return [(a, b) for a, b in both if a is not None and b is not None]


def differences(ours: Runs, others: Runs) -> list[float]:
    """In final accuracy, ours minus the others'."""
    return [b - a for a, b in paired(ours, others, final_accuracy)]


def sign_flip(values: Sequence[float]) -> float | None:
    """Two-sided p of a mean this far from 0, if each difference could as well have had the other sign; exact.

    >>> sign_flip([1.0, 1.0, 1.0])
    0.25
    """
    if not values:
        return None
    flips = np.array(list(itertools.product((-1, 1), repeat=len(values))))
    means = np.abs(flips @ np.asarray(values))
    return float((means >= abs(sum(values)) - 1e-12).mean())


def holm(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Correct for multiple comparisons by Holm's method.

    >>> holm({"a": 0.01, "b": 0.04, "c": None})
    {'a': 0.02, 'b': 0.04, 'c': None}
    """
    known = sorted((p, name) for name, p in values.items() if p is not None)
    corrected: dict[str, float | None] = dict.fromkeys(values)
    largest = 0.0
    for place, (p, name) in enumerate(known):
        largest = max(largest, min(p * (len(known) - place), 1.0))
        corrected[name] = round(largest, 4)
    return corrected


def winner(high: Mapping[str, Runs], best: Mapping[str, Runs], order: Sequence[str]) -> str | None:
    """The remedy that the protocol calls the winner; None if there is none.

    Args:
        high: each arm's runs at the high rate, `partial` among them; `best`: at the best rate of `partial`.
        order: the remedies, the cheapest first.
    """
    p = holm({arm: sign_flip(differences(high[arm], high["partial"])) for arm in order})
    won = [arm for arm in order if (p[arm] or 1.0) < 0.05 and _no_worse(best[arm], best["partial"])]
    top = max((mean_accuracy(high[arm]) for arm in won), default=0.0)
    return next((arm for arm in won if mean_accuracy(high[arm]) >= top - 0.01), None)


def _no_worse(ours: Runs, others: Runs) -> bool:
    found = bootstrap(differences(ours, others))
    return found["high"] is not None and found["high"] >= 0
