"""Which N' to take, of what is forecast for several: the freshest data that throughput close to the best allows.

One forecast is off by 5 to 19 % where most groups are under way, as what ends together goes on ending together for a
while. So forecasts of the same N' are averaged from plan to plan, until the workload is seen to have changed.

Invariant: batch_size <= N' <= largest, and whatever is chosen was forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log
from statistics import median

import numpy as np

from april.rollout.admission.forecast import Forecast

STALER = 0.15
"""Mean staleness, in versions, by which the N' in force may be worse than the best: estimates come and go by as much,
and each change costs a few steps until as many groups are under way."""
PRICE = 0.005
"""Part of the throughput that each version of mean staleness has to bring: forecasts of many groups under way are a
little too hopeful, and fresher data is worth something."""
NEAR = 1.25
"""How many times more or less than the best it may be."""
FIRM, CLOSE = 3, 0.9
"""Plans whose mean has to ask for staler data, where the N' in force brings that part of the best: single forecasts
come and go by more than what staler data would bring there."""
NEWEST = 0.2
"""Weight of the newest plan's forecasts in the mean, once there have been enough."""
CHANGED = 0.1
"""How far off the mean they are, in the middle of all N' and as a logarithm, if the workload has changed."""


def ladder(batch_size: int, largest: int, candidates: int) -> list[int]:
    """N' to forecast, evenly spaced in their logarithm."""
    rungs = np.geomspace(batch_size, largest, min(candidates, largest - batch_size + 1))
    tried: list[int] = np.unique(np.round(rungs)).astype(int).tolist()
    return tried


@dataclass(slots=True)
class Means:
    """What a run's plans have forecast for each N', on average."""

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

        return median(abs(size(forecast) - size(self.forecasts[n])) for n, forecast in newest.items())


class Choice:
    """Chooses among what was forecast.

    Args:
        played: forecasts, by N'.
        forecast: what another N' would bring.
        share: the part of the best that is enough.
        plans: how many the forecasts are the mean of.
    """

    def __init__(
        self, played: Mapping[int, Forecast], forecast: Callable[[int], Forecast], share: float, plans: int
    ) -> None:
        self.played = dict(played)
        self._forecast = forecast
        self.share = share
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
        """Forecast tokens/s, less what their staleness has to earn."""
        forecast = self.play(target)
        return forecast.consumed_tokens_per_second * (1 - PRICE * forecast.staleness)

    @property
    def most(self) -> float:
        """What the N' is worth that is worth most."""
        return max(map(self.worth, self.played))

    def enough(self, target: int) -> bool:
        return self.worth(target) >= self.share * self.most

    def choose(self, now: int | None) -> int:
        """The N' of least staleness, of those that are fast enough; the one in force if it is about as good."""
        chosen = self._freshest()
        if now is None:
            return chosen
        staler = self.play(chosen).staleness - self.play(now).staleness
        if staler > 0 and self.worth(now) >= (CLOSE if self.plans < FIRM else self.share) * self.most:
            return now
        near = max(now, chosen) <= NEAR * min(now, chosen)
        return now if near and self.enough(now) and -staler <= STALER else chosen

    def _freshest(self) -> int:
        return min(filter(self.enough, sorted(self.played)), key=lambda target: self.played[target].staleness)
