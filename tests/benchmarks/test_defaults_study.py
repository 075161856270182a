"""The analysis of the study of the defaults: runs that miss the target, cells of the pool, checks before a change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "accuracy"))

import defaults_analysis
import defaults_rates

STEPS = 6


def run(
    arm: str, seed: int, end: float, seconds: float, task: str = "gcd", scale: float = 1.0, start: float = 0.5
) -> dict[str, Any]:
    """A run whose reward rises evenly from `start` to `end`, with steps of `seconds`."""
    rewards = [start + (end - start) * step / STEPS for step in range(STEPS + 1)]
    work = {name: [seconds / 2] * STEPS for name in ("rollout", "training", "cpu_rollout", "cpu_training")}
    return {
        "key": f"{task}-{arm}-{scale}-{seed}",
        "task": task,
        "algorithm": "grpo",
        "arm": arm,
        "seed": seed,
        "scale": scale,
        "evaluations": [[step, 64 * step, reward, reward] for step, reward in enumerate(rewards)],
        **work,
        "by_step": {"over_sampling_batch_size": [8.0] * STEPS},
        "staleness_mean": 0.5,
        "staleness_max": 3,
        "idle_seconds": 0.0,
        "cpu_seconds": 1.0,
    }


@pytest.mark.parametrize(
    ("ours", "others", "expected"),
    [
        ((0.8, 1.0), (0.8, 2.0), 0.5),
        ((0.6, 1.0), (0.6, 2.0), 1.0),
        ((0.6, 1.0), (0.8, 2.0), 12 / 8),
        ((0.6, 3.0), (0.8, 2.0), 18 / 8),
        ((0.8, 1.0), (0.6, 2.0), 4 / 12),
    ],
    ids=["both reach", "both miss", "ours misses", "ours misses and is longer", "the other misses"],
)
@pytest.mark.parametrize("clock", ["accelerator", "cpu"])
def test_misses_are_charged_against_the_first_run(
    clock: str, ours: tuple[float, float], others: tuple[float, float], expected: float
) -> None:
    measure = defaults_analysis.charged(clock)
    found = measure(run("automatic", 1, *ours), run("synchronous", 1, *others), 0.7)
    assert np.exp(found) == pytest.approx(expected)


def test_a_run_that_starts_at_the_target_has_the_cost_until_its_first_evaluation_after_training() -> None:
    found = defaults_analysis.to_target(run("automatic", 1, 0.8, 2.0, start=0.75), 0.7, "accelerator")
    assert found == (2.0, True)


def test_the_pool_has_the_cells_with_all_compared_arms_and_no_second_cell_of_gcd() -> None:
    arms = {"synchronous": 2.0, "automatic": 1.0, "twice": 1.1}
    tasks = {"gcd": 4, "factors": 4, "primes": 3, "quickstart": 4, "gcd_one_update": 4}
    records = [
        run(arm, seed, 0.8 + 0.01 * (seed % 2), seconds, task)
        for task, seeds in tasks.items()
        for arm, seconds in arms.items()
        for seed in range(seeds if arm == "twice" else 4)
    ]
    found = defaults_analysis.analyse(records)
    assert set(found["cells"]) == {f"{task}, grpo, rate × 1" for task in tasks}
    assert found["pooled"]["cells"] == ["gcd, grpo", "factors, grpo"]
    pooled = found["pooled"]["arms"]["automatic"]["minus_synchronous"]
    assert pooled["accelerator_to_target"]["mean"] == pooled["accelerator_whole_run"]["mean"] == 0.5
    assert pooled["cpu_to_target_misses_charged"]["pairs"] == 8


@pytest.mark.parametrize(
    ("time", "reward", "default"),
    [(0.9, 0.0, "twice-decoupled"), (1.1, 0.0, "automatic"), (0.9, -0.02, "automatic")],
)
def test_a_failed_check_rejects_the_arm_that_the_rule_names(time: float, reward: float, default: str) -> None:
    against = {"accelerator_to_target": {"mean": time}, "final_reward": {"mean": reward}}
    name = "gcd_one_update, grpo, rate × 1"
    cells = {name: {"arms": {"twice-decoupled": {"relative_to_default": against}}}}
    found = defaults_analysis.decision("twice-decoupled", cells)
    assert (found["named_by_the_rule"], found["default"]) == ("twice-decoupled", default)
    assert found["checks"][name]["passed"] == (default == "twice-decoupled")
    assert defaults_analysis.decision("automatic", cells)["checks"] == {}


def test_best_rates_are_compared_on_the_seeds_of_all_rates_as_well() -> None:
    records = [
        run(arm, seed, 0.8 if seed < 4 else 0.9, seconds, scale=1.0)
        for arm, seconds in (("synchronous", 2.0), ("automatic", 1.0))
        for seed in range(8)
    ] + [
        run(arm, seed, 0.83, seconds, scale=2.0)
        for arm, seconds in (("synchronous", 2.0), ("automatic", 1.0))
        for seed in range(4)
    ]
    [rates] = defaults_rates.rates_of(records).values()
    found = defaults_rates.described(rates)
    assert found["best_rate"] == {"synchronous": 1.0, "automatic": 1.0}
    assert found["on_shared_seeds"]["best_rate"] == {"synchronous": 2.0, "automatic": 2.0}
    assert found["on_shared_seeds"]["at_best_rates"]["accelerator_to_target"]["pairs"] == 4
