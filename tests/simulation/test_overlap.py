"""Generation that overlaps with training in virtual time: its gain, and automatic N' under a busy trainer."""

from __future__ import annotations

import numpy as np
import pytest

from april.simulation.cost_model import CostModel
from april.simulation.run import Outcome, simulate
from april.simulation.workload import Part, Workload

WORKLOAD = Workload("short", (Part(120, 0.9),), max_tokens=1000, rollout_batch_size=8, n_samples_per_prompt=4)
COST = CostModel(
    slots=32,
    kv_tokens=100_000,
    decode_batches=(1, 32),
    decode_seconds=(0.01, 0.014),
    update_seconds=0.1,
    interrupt_seconds=0.02,
)
ROLLOUT = 0.0015
"""Seconds of a synchronous rollout for each token that is trained on."""


def run(trainer: float, overlap: bool, target: int | str) -> Outcome:
    """With a trainer that takes `trainer` times longer than a synchronous rollout."""
    return simulate(
        WORKLOAD,
        COST,
        steps=24,
        warm_up=12,
        train_token_seconds=trainer * ROLLOUT,
        overlap=overlap,
        over_sampling_batch_size=target,
        max_staleness=4,
        on_update="keep",
    )


def chosen(outcome: Outcome) -> float:
    assert outcome.max_staleness <= 4
    return float(np.mean([step.target for step in outcome.counted]))


def test_automatic_over_sampling_gains_as_much_from_overlap_as_a_good_fixed_value() -> None:
    alternating, overlapping = run(0.25, False, "auto"), run(0.25, True, "auto")
    assert overlapping.overall_tokens_per_second > 1.35 * alternating.overall_tokens_per_second
    assert overlapping.overall_tokens_per_second > 0.97 * run(0.25, True, 16).overall_tokens_per_second


def test_automatic_over_sampling_throttles_if_the_trainer_is_slower() -> None:
    slow, fast, fixed = run(2.0, True, "auto"), run(0.25, True, "auto"), run(2.0, True, 16)
    assert chosen(slow) < 0.75 * chosen(fast)
    assert slow.overall_tokens_per_second == pytest.approx(fixed.overall_tokens_per_second, rel=0.02)
    assert slow.mean_staleness < fixed.mean_staleness - 0.4
