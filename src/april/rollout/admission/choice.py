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
FIRM, CLOSE = 3, 0.9
"""A change to staler data needs the mean of `FIRM` plans if the current N' reaches `CLOSE` of the best: single
forecasts fluctuate by more than the gain of staler data."""
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
        played: forecasts, by N'.
        forecast: computes the forecast of another N'.
        plans: number of plans that the forecasts are the mean of.
    """

    def __init__(self, played: Mapping[int, Forecast], forecast: Callable[[int], Forecast], plans: int) -> None:
        self.played = dict(played)
        self._forecast = forecast
        self.plans = plans

    @property
    def best(self) -> float:
        """The highest forecast throughput."""
        return max(forecast.consumed_tokens_per_second for forecast in self.played.values())

    def play(self, target: int) -> Forecast:
        if target not in self.played:
            self.played[target] = self._forecast(target)
        return self.played[target]

    def worth(self, target: int) -> float:
        """Return forecast tokens/s, reduced by the price of their staleness."""
        forecast = self.play(target)
        return forecast.consumed_tokens_per_second * (1 - PRICE * forecast.staleness)

    @property
    def most(self) -> float:
        """The highest `worth` of all forecasts."""
        return max(map(self.worth, self.played))

    def enough(self, target: int) -> bool:
        return self.worth(target) >= SUFFICIENT * self.most

    def choose(self, now: int | None) -> int:
        """Return the N' with the least staleness that is fast enough, or the current one if it is about as good."""
        chosen = self._freshest()
        if now is None:
            return chosen
        staler = self.play(chosen).staleness - self.play(now).staleness
        if staler > 0 and self.worth(now) >= (CLOSE if self.plans < FIRM else SUFFICIENT) * self.most:
            return now
        near = max(now, chosen) <= NEAR * min(now, chosen)
        return now if near and self.enough(now) and -staler <= STALER else chosen

    def _freshest(self) -> int:
        return min(filter(self.enough, sorted(self.played)), key=lambda target: self.played[target].staleness)
