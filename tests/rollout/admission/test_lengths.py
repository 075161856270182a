from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from april.rollout.admission.lengths import LengthModel

CAP = 2000
Lengths = NDArray[np.int64]


def lognormal(rng: np.random.Generator, n: int, scale: float = 200) -> Lengths:
    return np.clip(np.ceil(scale * np.exp(rng.standard_normal(n))), 1, CAP).astype(int)


def bimodal(rng: np.random.Generator, n: int) -> Lengths:
    return np.where(rng.random(n) < 0.8, rng.integers(40, 80, n), rng.integers(1000, 1500, n))


def constant(rng: np.random.Generator, n: int) -> Lengths:
    return np.full(n, 137)


def mostly_truncated(rng: np.random.Generator, n: int) -> Lengths:
    return np.where(rng.random(n) < 0.7, CAP, rng.integers(1, CAP, n))


WORKLOADS = {f.__name__: f for f in (lognormal, bimodal, constant, mostly_truncated)}


def interrupted(model: LengthModel, lengths: Lengths, depth: int, steps: int) -> None:
    """Steps of `depth` tokens; responses start in equal shares at each step, and continue until they are finished."""
    share = len(lengths) // steps
    progress, waiting = np.zeros(0, int), lengths[:0]
    for step in range(steps):
        waiting = np.concatenate((waiting, lengths[step * share : (step + 1) * share]))
        progress = np.concatenate((progress, np.zeros(share, int)))
        after = np.minimum(progress + depth, waiting)
        done = after == waiting
        model.observe(progress, after, done)
        progress, waiting = after[~done], waiting[~done]


@pytest.mark.parametrize("name", WORKLOADS)
@given(depth=st.integers(30, 3000), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_the_distribution_is_recovered_although_interruptions_censor_it(name: str, depth: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = WORKLOADS[name](rng, 12_000)
    model = LengthModel(CAP, half_life=1e9)
    interrupted(model, lengths, depth, steps=12)
    at = model.edges
    longest_seen = min(depth * 12, CAP)
    truth = (lengths[:, None] > at).mean(0)
    truth[-1] = (lengths == CAP).mean()
    seen = at < 0.5 * longest_seen
    # Where all are equally long, one of the eight or more shares that got so far may have stopped within the last bin.
    tolerance = 0.13 if name == "constant" else 0.05
    assert np.abs(model.survival - truth)[seen].max() < tolerance
    if depth > 400:
        assert model.mean == pytest.approx(lengths.mean(), rel=0.06)


def test_leaving_out_what_is_unfinished_would_take_responses_for_shorter() -> None:
    """The reason for the estimator: the mean of finished responses is far too low."""
    lengths = lognormal(np.random.default_rng(0), 4000)
    model = LengthModel(CAP, half_life=1e9)
    after = np.minimum(lengths, 300)
    model.observe(np.zeros(len(lengths)), after, lengths <= 300)
    assert lengths[lengths <= 300].mean() < 0.5 * lengths.mean()
    assert model.survival[model.edges <= 250][-1] == pytest.approx((lengths > 250).mean(), abs=0.05)


SPANS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.booleans()), max_size=40)


@given(st.integers(1, 5000), SPANS)
@settings(max_examples=200, deadline=None)
def test_survival_falls_from_one_and_nothing_is_longer_than_the_budget(
    budget: int, seen: list[tuple[int, int, bool]]
) -> None:
    model = LengthModel(budget)
    spans = [(min(a, budget), min(a + b, budget), done and b > 0) for a, b, done in seen]
    model.observe(*(np.array(column) for column in zip(*spans, strict=True))) if spans else None
    survival = model.survival
    assert survival[0] == 1
    assert (np.diff(survival) <= 0).all()
    assert (survival >= 0).all()
    drawn = model.draw(20, 3, np.random.default_rng(0), even=8)
    assert drawn.min() >= 1
    assert drawn.max() <= budget
    assert 0 <= model.mean <= budget


def test_it_follows_lengths_that_drift() -> None:
    rng = np.random.default_rng(1)
    model = LengthModel(CAP)
    for step in range(60):
        lengths = lognormal(rng, 256, 50 if step < 30 else 400)
        model.observe(np.zeros(256), lengths, np.full(256, True))
        if step in (29, 59):
            assert model.mean == pytest.approx(lognormal(rng, 50_000, 50 if step < 30 else 400).mean(), rel=0.1)


def correlated(rng: np.random.Generator, groups: int, size: int, rho: float) -> Lengths:
    scores = np.sqrt(rho) * rng.standard_normal((groups, 1)) + np.sqrt(1 - rho) * rng.standard_normal((groups, size))
    return np.clip(np.ceil(200 * np.exp(scores)), 1, CAP).astype(int)


def learned(lengths: Lengths) -> LengthModel:
    """A model that has seen these groups from their beginnings to their ends, shape [groups, samples]."""
    model = LengthModel(CAP, half_life=1e9)
    model.observe(np.zeros(lengths.size), lengths.ravel(), np.full(lengths.size, True))
    model.observe_groups(lengths)
    return model


@pytest.mark.parametrize("rho", [0.0, 0.4, 0.8])
def test_the_correlation_within_groups_is_recovered_and_drawn(rho: float) -> None:
    rng = np.random.default_rng(2)
    lengths = correlated(rng, 2000, 8, rho)
    model = learned(lengths)
    assert model.correlation == pytest.approx(rho, abs=0.06)
    drawn = model.draw(2000, 8, rng, even=500)
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.08)
    assert drawn.max(1).mean() == pytest.approx(lengths.max(1).mean(), rel=0.08)


def test_even_draws_have_the_whole_distribution_in_every_stretch_and_the_same_correlation() -> None:
    rng = np.random.default_rng(4)
    lengths = correlated(rng, 4000, 4, 0.6)
    model = learned(lengths)
    even = model.draw(3200, 4, rng, even=64).reshape(50, 64, 4)
    independent = correlated(rng, 3200, 4, 0.6).reshape(50, 64, 4)
    assert even.mean((1, 2)).std() < 0.5 * independent.mean((1, 2)).std()
    assert even.mean() == pytest.approx(lengths.mean(), rel=0.03)
    assert even.max(2).mean() == pytest.approx(lengths.max(1).mean(), rel=0.03)


def test_it_is_saved_and_restored() -> None:
    rng = np.random.default_rng(5)
    model, again = LengthModel(CAP), LengthModel(CAP)
    for _ in range(3):
        lengths = correlated(rng, 30, 4, 0.5)
        model.observe(np.zeros(lengths.size), lengths.ravel(), rng.random(lengths.size) < 0.7)
        model.observe_groups(lengths)
    again.load_state_dict(json.loads(json.dumps(model.state_dict())))
    assert (again.survival == model.survival).all()
    assert again.correlation == model.correlation


def test_a_response_that_ended_without_a_token_counts_as_the_shortest() -> None:
    model = LengthModel(CAP)
    model.observe([0] * 50, [0] * 50, [True] * 50)
    assert model.finished[0] == 50
    assert model.survival[1] < 0.05


def test_responses_begun_with_a_larger_budget_count_as_truncated() -> None:
    """A run may be resumed with a smaller budget while longer responses are in flight."""
    larger, smaller = LengthModel(8), LengthModel(8)
    larger.observe([0, 6, 20], [4, 30, 40], [True, True, False])
    smaller.observe([0, 6, 8], [4, 8, 8], [True, True, False])
    assert larger.state_dict() == smaller.state_dict()
