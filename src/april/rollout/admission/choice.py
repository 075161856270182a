"""Choice of N' from forecasts: the freshest data whose throughput is close to the best.

A single forecast is off by 5 to 19 % with most groups in flight, because samples that finish together keep doing so for
some time. So forecasts of the same N' are averaged over plans until the workload has changed.

Invariant: batch_size <= N' <= largest, and the chosen N' was forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log
from statistics import median

import numpy as np

from april.rollout.admission.forecast import Forecast

SUFFICIENT = 0.98
"""Share of the best throughput that is fast enough."""
STALER = 0.15
"""Mean staleness, in versions, by which the current N' may exceed the best: estimates fluctuate by this amount, and
each change costs a few steps until the new number of groups is in flight."""
PRICE = 0.005
"""Share of the throughput that each version of mean staleness must gain: forecasts for many groups in flight are
slightly optimistic, and fresher data has a value."""
NEAR = 1.25
"""Largest ratio of the current N' to the best, in either direction, at which the current one is kept."""
AVERAGED, SUFFICIENT_BEFORE = 3, 0.9
"""A change to staler data needs the mean of `AVERAGED` plans if the current N' reaches `SUFFICIENT_BEFORE` of the best:
single forecasts fluctuate by more than the gain of staler data."""
NEWEST = 0.2
"""Smallest weight of the newest plan's forecasts in the mean."""
CHANGED = 0.1
"""Median distance of new forecasts from the mean, as a logarithm, above which the workload has changed."""


def ladder(batch_size: int, largest: int, candidates: int) -> list[int]:
    """Return the values of N' to forecast, evenly spaced in their logarithm."""
    rungs = np.geomspace(batch_size, largest, min(candidates, largest - batch_size + 1))
    tried: list[int] = np.unique(np.round(rungs)).astype(int).tolist()
    return tried


@dataclass(slots=True)
class Means:
    """Mean forecasts of a run's plans for each N'."""

    plans: int = 0
    forecasts: dict[int, Forecast] = field(default_factory=dict)

    def add(self, newest: Mapping[int, Forecast]) -> None:
        if newest.keys() != self.forecasts.keys() or self._far_from(newest) > CHANGED:
            self.plans, self.forecasts = 1, dict(newest)
            return
        self.plans += 1
        weight = max(NEWEST, 1 / self.plans)
        self.forecasts = {n: self.forecasts[n].towards(forecast, weight) for n, forecast in newest.items()}

    def _far_from(self, newest: Mapping[int, Forecast]) -> float:
        def size(forecast: Forecast) -> float:
            return log(max(forecast.consumed_tokens_per_second, 1e-9))

        # The median, because single forecasts are far off without a change of the workload.
        return median(abs(size(forecast) - size(self.forecasts[n])) for n, forecast in newest.items())


class Choice:
    """Chooses among forecasts.

    Args:
        forecasts: forecasts, by N'.
        compute: computes the forecast of another N'.
        plans: number of plans that the forecasts are the mean of.
    """

    def __init__(self, forecasts: Mapping[int, Forecast], compute: Callable[[int], Forecast], plans: int) -> None:
        self.forecasts = dict(forecasts)
        self._compute = compute
        self.plans = plans

    @property
    def best_throughput(self) -> float:
        """The highest forecast throughput."""
        return max(forecast.consumed_tokens_per_second for forecast in self.forecasts.values())

    def forecast(self, target: int) -> Forecast:
        if target not in self.forecasts:
            self.forecasts[target] = self._compute(target)
        return self.forecasts[target]

    def worth(self, target: int) -> float:
        """Return forecast tokens/s, reduced by the price of their staleness."""
        forecast = self.forecast(target)
        return forecast.consumed_tokens_per_second * (1 - PRICE * forecast.staleness)

    @property
    def best_worth(self) -> float:
        """The highest `worth` of all forecasts."""
        return max(map(self.worth, self.forecasts))

    def enough(self, target: int) -> bool:
        return self.worth(target) >= SUFFICIENT * self.best_worth

    def choose(self, now: int | None) -> int:
        """Return the N' with the least staleness that is fast enough, or the current one if it is about as good."""
        chosen = self._freshest()
        if now is None:
            return chosen
        staler = self.forecast(chosen).staleness - self.forecast(now).staleness
        if (
            staler > 0
            and self.worth(now) >= (SUFFICIENT_BEFORE if self.plans < AVERAGED else SUFFICIENT) * self.best_worth
        ):
            return now
        near = max(now, chosen) <= NEAR * min(now, chosen)
        return now if near and self.enough(now) and -staler <= STALER else chosen

    def _freshest(self) -> int:
        return min(filter(self.enough, sorted(self.forecasts)), key=lambda target: self.forecasts[target].staleness)
