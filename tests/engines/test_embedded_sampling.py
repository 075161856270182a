"""Drawing tokens, against an independent computation in NumPy and against the frequencies it should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.embedded.sampling import sample
from april.engines.embedded.uniforms import UniformStream
from april.rollout.sampling import SamplingParams

SMALL, LARGE = 50, 3003
"""Vocabularies on both sides of where the sum is done in blocks; the larger one fills no whole number of them."""


def drawn_from(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution to draw from: temperature, then top-k, top-p and min-p, each on what the one before leaves."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        enough = int(np.argmax(np.cumsum(p[order]) >= params.top_p)) + 1
        p[order[enough:]] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def random_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 2.5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * scale).astype(np.float32)


def draw(logits: np.ndarray, params: SamplingParams, numbers: list[float]) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs = sample(torch.from_numpy(logits.copy()), [params] * len(logits), numbers)
    return np.array(tokens), np.array(logprobs)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_and_logprobs_follow_the_distribution(setting: dict[str, Any], vocabulary: int) -> None:
    params, rows = SamplingParams(**setting), 150
    logits = random_logits(rows, vocabulary)
    numbers = UniformStream(1).peek(rows)
    tokens, logprobs = draw(logits, params, numbers)
    for row, token in enumerate(tokens):
        p = drawn_from(logits[row], params)
        assert p[token] > 0
        assert abs(np.log(p[token]) - logprobs[row]) < 1e-5
        cumulative = np.cumsum(p)
        assert cumulative[token] - p[token] - 1e-6 <= numbers[row] <= cumulative[token] + 1e-6


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 8, "min_p": 0.02}], ids=str)
def test_frequencies_fit(setting: dict[str, Any], vocabulary: int) -> None:
    """Pearson's chi-square over the tokens expected at least ten times; the seeds are fixed, so is the outcome."""
    params, draws = SamplingParams(**setting), 20_000
    logits = random_logits(1, vocabulary, scale=3.5)
    p = drawn_from(logits[0], params)
    numbers = [UniformStream(seed).peek(1)[0] for seed in range(draws)]
    seen = np.zeros(vocabulary)
    for some in np.split(np.array(numbers), 20):
        tokens, _ = draw(np.repeat(logits, len(some), 0), params, some.tolist())
        seen += np.bincount(tokens, minlength=vocabulary)
    often = p * draws >= 10
    expected = np.append(p[often] * draws, p[~often].sum() * draws)
    found = np.append(seen[often], seen[~often].sum())
    statistic = float(((found - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    degrees = len(expected) - 1
    # The statistic's mean is its degrees of freedom, its variance twice that.
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)
    assert seen[p == 0].sum() == 0


def test_greedy_takes_the_largest_logit_and_returns_its_softmax() -> None:
    logits = random_logits(20, SMALL)
    tokens, logprobs = draw(logits, SamplingParams(temperature=0, top_k=3), [0.9] * 20)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    expected = torch.from_numpy(logits).log_softmax(-1).max(-1).values.numpy()
    assert np.abs(logprobs - expected).max() < 1e-6


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_that_exist(number: float, vocabulary: int) -> None:
    logits = random_logits(4, vocabulary)
    logits[:, :3] = -np.inf
    logits[:, -300:] = -np.inf if vocabulary == LARGE else logits[:, -300:]
    tokens, logprobs = draw(logits, SamplingParams(), [number] * 4)
    assert np.isfinite(logprobs).all()
    assert np.isfinite(logits[np.arange(4), tokens]).all()


def test_ties_do_not_enlarge_the_top_k_set() -> None:
    logits = np.zeros((2000, SMALL), np.float32)
    tokens, logprobs = draw(logits, SamplingParams(top_k=5), UniformStream(3).peek(2000))
    assert len(set(tokens.tolist())) == 5
    assert np.abs(logprobs - np.log(1 / 5)).max() < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([2, SMALL, 2048, 2049, LARGE]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_p=st.sampled_from([0.2, 0.95, 1.0]),
        top_k=st.sampled_from([0, 1, 13]),
        min_p=st.sampled_from([0.0, 0.2]),
    ),
    others=st.sampled_from([SamplingParams(), SamplingParams(temperature=0.5, top_k=4)]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_row_does_not_depend_on_other_rows(
    vocabulary: int, params: SamplingParams, others: SamplingParams, scale: float, seed: int
) -> None:
    logits = random_logits(5, vocabulary, seed % 1000, scale)
    numbers = UniformStream(seed).peek(5)
    alone = sample(torch.from_numpy(logits[2:3].copy()), [params], numbers[2:3])
    mixed = [others, others, params, others, params]
    tokens, logprobs = sample(torch.from_numpy(logits.copy()), mixed, numbers)
    assert tokens[2] == alone[0][0]
    assert logprobs[2] == pytest.approx(alone[1][0], abs=1e-6)


def test_half_precision_logits_are_read_in_full_precision() -> None:
    logits = torch.from_numpy(random_logits(8, SMALL)).bfloat16()
    expected = logits.float().log_softmax(-1)
    tokens, logprobs = sample(logits.clone(), [SamplingParams()] * 8, UniformStream(0).peek(8))
    assert np.abs(expected[torch.arange(8), tokens].numpy() - np.array(logprobs)).max() < 1e-6


@given(seed=st.integers(0, 2**64 - 1), start=st.integers(0, 400))
def test_the_random_stream_can_start_at_any_position(seed: int, start: int) -> None:
    whole = UniformStream(seed).peek(start + 70)
    assert UniformStream(seed, start).peek(70) == whole[start:]
    assert all(0 <= number < 1 for number in whole)


def test_streams_differ_by_seed() -> None:
    assert len({UniformStream(seed).peek(1)[0] for seed in range(1000)}) == 1000
