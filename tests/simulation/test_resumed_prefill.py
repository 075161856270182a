"""The share of an engine's time in which resumed samples are prefilled: as simulated, and as estimated in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from april.rollout.engine import KVPolicy
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.run import scheduler_of, simulate
from april.simulation.virtual_time import run
from april.simulation.workload import Part, Workload

COST = CostModel(
    slots=64,
    kv_tokens=10**7,
    decode_batches=(1, 64),
    decode_seconds=(8e-3, 12e-3),
    kv_token_seconds=1e-8,
    prefill_token_seconds=1e-4,
)
LENGTHS = Workload(
    "lognormal", (Part(256, 0.9),), max_tokens=2048, prompt_tokens=32, rollout_batch_size=8, n_samples_per_prompt=8
)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_prefill_of_resumed_samples_is_counted_by_itself(on_update: KVPolicy) -> None:
    partial = {"over_sampling_batch_size": 16, "max_staleness": 5}
    outcome = simulate(LENGTHS, COST, steps=8, warm_up=2, on_update=on_update, **partial)
    synchronous = simulate(LENGTHS, COST, steps=8, warm_up=2, partial_rollout=False)
    assert synchronous.resumed_prefill_seconds == 0
    assert (outcome.resumed_prefill_seconds > 0.1 * outcome.prefill_seconds) == (on_update == "recompute")
    assert outcome.resumed_prefill_seconds < outcome.prefill_seconds


def test_a_run_with_automatic_admission_estimates_the_share() -> None:
    def shares(cost: CostModel) -> tuple[float, float]:
        async def collect() -> tuple[float, float]:
            engine = SimulatedEngine(cost, LENGTHS)
            params = {"over_sampling_batch_size": "auto", "max_staleness": 5}
            before = seconds = 0.0
            async with scheduler_of(engine, LENGTHS, LENGTHS.prompts(), params, 0) as scheduler:
                for number in range(24):
                    step = await scheduler.next_batch()
                    assert (step.plan.resumed_prefill_share is None) == (step.plan.staleness is None)
                    seconds += step.seconds if number >= 16 else 0.0
                    await scheduler.update_weights()
                    before = engine.replicas.resumed_prefill_seconds if number < 16 else before
            return step.metrics()["resumed_prefill_share"], (engine.replicas.resumed_prefill_seconds - before) / seconds

        return run(collect())

    estimated, true = shares(COST)
    assert true > 0.05
    assert 0.5 * true < estimated < 1.5 * true
    estimated, true = shares(replace(COST, prefill_token_seconds=1e-7))
    assert true < 1e-3
    assert estimated < 0.03
