from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.measurement import serve
from april.simulation.run import Outcome, simulate
from april.simulation.virtual_time import run
from april.simulation.workload import Part, Workload

COST = CostModel(
    slots=8,
    kv_tokens=10_000,
    decode_batches=(1, 8),
    decode_seconds=(0.01, 0.013),
    kv_token_seconds=1e-5,
    prefill_token_seconds=1e-3,
    request_seconds=1e-3,
    update_seconds=0.3,
    interrupt_seconds=0.02,
)
WORKLOAD = Workload(
    "test", (Part(30, 0.8),), max_tokens=200, prompt_tokens=20, rollout_batch_size=4, n_samples_per_prompt=2
)
ENDLESS = Workload("endless", (Part(1e9, 0.01),), max_tokens=10**9)


@pytest.mark.parametrize(
    "settings",
    [
        {"partial_rollout": False},
        {"over_sampling_batch_size": 10},
        {"rollout_batch_size": 3, "over_sampling_batch_size": 3},
    ],
)
def test_a_real_engine_serves_the_simulated_workload(settings: dict[str, Any]) -> None:
    """The same samples, lengths and steps: on an engine with the costs of the model, also the same seconds."""

    async def real() -> Outcome:
        clock = asyncio.get_running_loop().time
        engine = SimulatedEngine(COST, ENDLESS)
        return await serve(engine, WORKLOAD, engine.update_weights, steps=6, vocabulary=2**31, clock=clock, **settings)

    served, simulated = run(real()), simulate(WORKLOAD, COST, steps=6, warm_up=0, **settings)
    for ours, theirs in zip(served.steps, simulated.steps, strict=True):
        np.testing.assert_array_equal(ours.lengths, theirs.lengths)
        np.testing.assert_array_equal(ours.staleness, theirs.staleness)
        assert ours.seconds == pytest.approx(theirs.seconds)
        assert ours.update_seconds == pytest.approx(theirs.update_seconds)
