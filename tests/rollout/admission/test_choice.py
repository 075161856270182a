"""Forecasts of one N' are averaged over plans, until the workload changes."""

from __future__ import annotations

import numpy as np
import pytest

from april.rollout.admission.choice import CHANGED, NEWEST, Means, ladder
from april.rollout.admission.forecast import Forecast


def forecasts(rates: dict[int, float]) -> dict[int, Forecast]:
    return {target: Forecast(target, rate, 1.0) for target, rate in rates.items()}


def test_noise_of_single_forecasts_goes_away() -> None:
    rng = np.random.default_rng(0)
    true, means = {8: 100.0, 16: 200.0, 32: 300.0}, Means()
    for _ in range(200):
        means.add(forecasts({n: rate * float(np.exp(rng.uniform(-CHANGED, CHANGED) / 2)) for n, rate in true.items()}))
    assert means.plans == 200, "noise is no change of the workload"
    for target, rate in true.items():
        assert means.forecasts[target].consumed_tokens_per_second == pytest.approx(rate, rel=CHANGED / 3)


def test_the_first_few_count_alike() -> None:
    means = Means()
    for rate in (100.0, 104.0, 102.0):
        means.add(forecasts({8: rate}))
    assert means.forecasts[8].consumed_tokens_per_second == pytest.approx(102.0)
    assert NEWEST < 1 / 3


def test_a_changed_workload_begins_anew() -> None:
    means = Means()
    for _ in range(10):
        means.add(forecasts({8: 100.0, 16: 200.0, 32: 300.0}))
    means.add(forecasts({8: 100.0, 16: 200.0, 32: 200.0}))
    assert means.plans == 11, "one N' that is off is noise"
    means.add(changed := forecasts({8: 60.0, 16: 120.0, 32: 300.0}))
    assert (means.plans, means.forecasts) == (1, changed)


def test_other_candidates_begin_anew() -> None:
    means = Means()
    means.add(forecasts({8: 100.0}))
    means.add(other := forecasts({8: 100.0, 16: 200.0}))
    assert (means.plans, means.forecasts) == (1, other)


@pytest.mark.parametrize(("batch_size", "largest", "candidates"), [(8, 48, 13), (4, 4, 13), (4, 6, 13), (1, 6, 6)])
def test_a_ladder_goes_from_a_batch_to_the_largest(batch_size: int, largest: int, candidates: int) -> None:
    rungs = ladder(batch_size, largest, candidates)
    assert (rungs[0], rungs[-1]) == (batch_size, largest)
    assert rungs == sorted(set(rungs))
    assert len(rungs) <= candidates
