"""Seeds of samples: distinct, uniform and independent across samples, groups and runs."""

from __future__ import annotations

import numpy as np

from april.rollout.trajectory.seeds import sample_seeds


def test_no_two_samples_share_a_seed() -> None:
    seeds = [
        seed
        for run in (0, 1, 2**40)
        for evaluation in (False, True)
        for group in range(2000)
        for seed in sample_seeds(run, group, 8, evaluation)
    ]
    assert len(set(seeds)) == len(seeds) == 96_000


def test_seeds_are_uniform_and_independent() -> None:
    """Each bit is set in half of the seeds, and is independent of the same bit of neighbouring samples and groups."""
    seeds = np.array([sample_seeds(7, group, 8) for group in range(4000)], dtype=np.uint64)
    bits = ((seeds[..., None] >> np.arange(64, dtype=np.uint64)) & 1).astype(float) - 0.5
    bound = 5 * 0.25 / np.sqrt(bits[..., 0].size)  # five standard deviations of a mean of products
    assert abs(bits.mean((0, 1))).max() < 2 * bound
    assert abs((bits[:, 1:] * bits[:, :-1]).mean((0, 1))).max() < bound
    assert abs((bits[1:] * bits[:-1]).mean((0, 1))).max() < bound


def test_a_sample_keeps_its_seed_in_a_larger_group() -> None:
    assert sample_seeds(3, 5, 16)[:8] == sample_seeds(3, 5, 8)
