from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import Group, SamplingParams
from april.simulation.workload import WORKLOADS, Part, Workload

LOGNORMAL = Workload("test", (Part(1000, 0.8),), max_tokens=10**9)


def of_groups(workload: Workload, groups: int, size: int = 8) -> np.ndarray:
    """Lengths as a scheduler's groups have them, shape [groups, size]."""
    started = [
        Group.start(i, prompt, size, SamplingParams(), 0)
        for i, prompt in enumerate(itertools.islice(workload.prompts(), groups))
    ]
    samples = [sample for group in started for sample in group.samples]
    numbers = np.array([sample.prompt_ids[0] for sample in samples])
    seeds = np.array([sample.seed for sample in samples], np.uint64)
    return workload.lengths(numbers, seeds).reshape(groups, size)


def test_lengths_have_the_configured_distribution() -> None:
    logs = np.log(LOGNORMAL.sample(100_000))
    assert np.median(logs) == pytest.approx(np.log(1000), abs=0.01)
    assert logs.std() == pytest.approx(0.8, abs=0.01)
    bimodal = WORKLOADS["bimodal"].sample(100_000)
    assert (bimodal > 2700).mean() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
def test_samples_of_a_group_have_the_configured_correlation_and_distribution(correlation: float) -> None:
    workload = Workload("test", (Part(1000, 0.8),), max_tokens=10**9, correlation=correlation)
    logs = np.log(of_groups(workload, 4000))
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(correlation, abs=0.05)
    assert logs.mean() == pytest.approx(np.log(1000), abs=0.05)
    assert logs.std() == pytest.approx(0.8, abs=0.03)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.randoms())
def test_a_length_is_the_same_in_any_company(numbers: list[int], random: object) -> None:
    prompts, seeds = np.array(numbers), np.array(numbers, np.uint64) * 31 + 7
    together = WORKLOADS["bimodal"].lengths(prompts, seeds)
    alone = [int(WORKLOADS["bimodal"].lengths(prompts[i : i + 1], seeds[i : i + 1])[0]) for i in range(len(numbers))]
    assert together.tolist() == alone


def test_lengths_drift_with_the_version_and_stop_at_the_cap() -> None:
    workload = WORKLOADS["drifting"]
    early, late = workload.sample(20_000), workload.sample(20_000, version=35)
    assert np.median(late) / np.median(early) == pytest.approx(1.02**35, rel=0.01)
    assert WORKLOADS["truncated"].sample(20_000).max() == WORKLOADS["truncated"].max_tokens


def test_prompts_are_numbered_and_the_same_each_time() -> None:
    first, again = (list(itertools.islice(LOGNORMAL.prompts(), 50)) for _ in range(2))
    assert first == again
    assert [prompt.token_ids[0] for prompt in first] == list(range(50))
    assert len({len(prompt.token_ids) for prompt in first}) > 10


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"correlation = 1\.5"):
        Workload("test", (Part(1000, 0.8),), correlation=1.5)
