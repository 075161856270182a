"""Episodes in virtual time: turns divide responses and change no length; waiting samples hold no slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from april.simulation.cost_model import CostModel
from april.simulation.run import Outcome, simulate
from april.simulation.turns import Turns
from april.simulation.workload import Part, Workload

WORKLOAD = Workload("short", (Part(120, 0.9),), max_tokens=600, rollout_batch_size=4, n_samples_per_prompt=4)
COST = CostModel(
    slots=16,
    kv_tokens=200_000,
    decode_batches=(1, 16),
    decode_seconds=(0.01, 0.014),
    update_seconds=0.1,
    interrupt_seconds=0.02,
)
QUICK = Turns(tokens=50, observation_tokens=5)
SLOW = dataclasses.replace(QUICK, seconds=1.0)
HEAVY = dataclasses.replace(SLOW, sigma=1.5)


def run(
    turns: Turns | None, target: int | str | None = None, steps: int = 8, workload: Workload = WORKLOAD, **more: Any
) -> Outcome:
    """With `target` groups in flight, or synchronous."""
    chosen = {"partial_rollout": False} if target is None else {"over_sampling_batch_size": target}
    settings = {"cost": COST, "on_update": "keep", "turns": turns, "max_staleness": 4, **chosen, **more}
    return simulate(workload, steps=steps, warm_up=steps // 2, **settings)


def test_turns_divide_responses_without_changing_their_lengths() -> None:
    whole, cut = run(None, steps=4), run(HEAVY, steps=4)
    assert [step.consumed_tokens for step in whole.steps] == [step.consumed_tokens for step in cut.steps]
    for one, other in zip(whole.steps, cut.steps, strict=True):
        assert sorted(one.lengths) == sorted(other.lengths)
    assert [step.seconds for step in run(HEAVY, steps=4).steps] == [step.seconds for step in cut.steps], "repeatable"


def test_a_step_lasts_as_long_as_environments_take() -> None:
    """A turn of 50 tokens is spoken in about 0.6 s, and answered in 1 s."""
    quick, slow = run(QUICK, steps=4), run(SLOW, steps=4)
    assert slow.rollout_seconds > 2 * quick.rollout_seconds
    assert slow.occupancy < 0.6 * quick.occupancy


def test_partial_rollouts_fill_the_slots_of_samples_that_wait_for_environments() -> None:
    synchronous, partial = run(HEAVY, steps=24, seed=1), run(HEAVY, 12, steps=24, seed=1)
    assert partial.consumed_tokens_per_second > 2 * synchronous.consumed_tokens_per_second
    assert partial.max_staleness <= 4
    for step in partial.steps:
        assert step.lengths.max() <= WORKLOAD.max_tokens


def test_automatic_over_sampling_keeps_more_groups_in_flight_with_slow_environments() -> None:
    """Slots of waiting samples are free for others: about the number of groups that keeps them busy is started."""
    quick, slow = run(QUICK, "auto", 12), run(SLOW, "auto", 12)

    def chosen(outcome: Outcome) -> float:
        return float(np.mean([step.target for step in outcome.counted]))

    assert chosen(slow) > 1.3 * chosen(quick)
    assert slow.consumed_tokens_per_second > 1.2 * run(SLOW, 8, 12).consumed_tokens_per_second
    assert slow.max_staleness <= 4


def test_observations_take_the_configured_mean_time() -> None:
    even = [SLOW.latency(sample, turn) for sample in range(100) for turn in range(10)]
    heavy = [HEAVY.latency(sample, turn) for sample in range(2000) for turn in range(10)]
    assert set(even) == {1.0}
    assert np.mean(heavy) == pytest.approx(1.0, rel=0.1)
    assert np.percentile(heavy, 99) > 10 * np.median(heavy)


def test_times_of_observations_depend_on_the_seed() -> None:
    """Responses of one length, one turn each: all that differs is how long their environments take."""
    alike = dataclasses.replace(WORKLOAD, parts=(), observed=(100,))
    turns = Turns(tokens=1e6, seconds=5.0, sigma=1.0)

    def seconds(seed: int) -> list[float]:
        return [step.seconds for step in run(turns, None, 2, alike, seed=seed).steps]

    assert seconds(0) == seconds(0)
    assert seconds(0) != seconds(1)


@pytest.mark.parametrize("target", [None, 12])
def test_an_episode_that_fills_the_kv_cache_is_cut_off_there(target: int | None) -> None:
    """600 tokens of the policy's fit, but not what environments may answer to fifty turns."""
    long, brief = Turns(tokens=12, observation_tokens=30), dataclasses.replace(WORKLOAD, prompt_tokens=20)
    costs = [dataclasses.replace(COST, kv_tokens=size) for size in (20_000, 1_000)]
    roomy, narrow = (run(long, target, 4, brief, cost=cost) for cost in costs)
    assert narrow.peak_kv <= 1
    assert sum(step.truncated for step in narrow.steps) > sum(step.truncated for step in roomy.steps)
    assert max(step.lengths.max() for step in narrow.steps) < max(step.lengths.max() for step in roomy.steps)


def test_invalid_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Turns(tokens=0.5)
