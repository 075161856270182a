"""Which N' to take, of what is forecast for several: the freshest data that throughput close to the best allows.

Invariant: batch_size <= N' <= largest, and whatever is chosen was forecast.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

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


class Choice:
    """Looks for N' between a batch and the largest that the bound allows.

    Args:
        forecast: what an N' would bring.
        share: the part of the best that is enough.
        candidates: N' that are tried, evenly spaced in their logarithm; a few more are, beside the best of them.
    """

    def __init__(
        self, forecast: Callable[[int], Forecast], batch_size: int, largest: int, share: float, candidates: int
    ) -> None:
        self._forecast = forecast
        self.share = share
        self.played: dict[int, Forecast] = {}
        ladder = np.unique(np.round(np.geomspace(batch_size, largest, min(candidates, largest - batch_size + 1))))
        for target in ladder.astype(int).tolist():
            self.play(target)

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

    def enough(self, target: int) -> bool:
        return self.worth(target) >= self.share * max(map(self.worth, self.played))

    def choose(self, now: int | None) -> int:
        """The N' of least staleness, of those that are fast enough; the one in force if it is about as good."""
        chosen = self._freshest()
        for _ in range(2):
            lower = max((target for target in self.played if target < chosen), default=chosen)
            self.play(round(sqrt(lower * chosen)))
            chosen = self._freshest()
        near = now is not None and max(now, chosen) <= NEAR * min(now, chosen)
        if now is not None and near and self.enough(now):
            return now if self.play(now).staleness <= self.play(chosen).staleness + STALER else chosen
        return chosen

    def _freshest(self) -> int:
        return min(filter(self.enough, sorted(self.played)), key=lambda target: self.played[target].staleness)
