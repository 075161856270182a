from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from april.rollout.engine import EngineError
from april.simulation.calibration import Calibration, Decoding, Prefill, Serving
from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.sweep import calibrate
from april.simulation.virtual_time import run
from april.simulation.workload import Part, Workload

TRUE = CostModel(
    slots=16,
    kv_tokens=100_000,
    decode_batches=(1, 16),
    decode_seconds=(0.01, 0.025),
    kv_token_seconds=2e-6,
    prefill_token_seconds=1e-4,
    prefill_pair_seconds=1e-8,
    request_seconds=2e-3,
    update_seconds=0.7,
    interrupt_seconds=0.05,
    prefix_caching=True,
)


def test_exact_measurements_recover_the_costs() -> None:
    base = {b: 0.01 + 0.001 * (b - 1) for b in (1, 2, 4, 8)}
    measured = Calibration(8, 1000)
    measured.decoding = [Decoding(b, kv, base[b] + 3e-6 * kv) for b in base for kv in (10.0 * b, 500.0 * b)]
    measured.prefill = [Prefill(n * (t,), n * (1e-4 * t + 2e-7 * t * t)) for n in (1, 4) for t in (16, 64, 256, 512)]
    cost = measured.fit("test")
    assert cost.decode_seconds == pytest.approx(tuple(base.values()))
    assert cost.kv_token_seconds == pytest.approx(3e-6)
    assert cost.prefill_token_seconds == pytest.approx(1e-4)
    assert cost.prefill_pair_seconds == pytest.approx(2e-7)
    assert max(cost.errors.values()) < 1e-6


def test_costs_are_not_negative_and_the_error_measures_the_fit() -> None:
    rng = np.random.default_rng(0)
    measured = Calibration(4, 1000)
    measured.decoding = [Decoding(b, 100.0 * b, rng.uniform(0.01, 0.02)) for b in (1, 2, 4) for _ in range(5)]
    measured.prefill = [Prefill((t,), rng.uniform(0.01, 0.02)) for t in (512, 256, 64, 16)]
    cost = measured.fit("noise")
    assert min(cost.prefill_token_seconds, cost.prefill_pair_seconds, cost.kv_token_seconds) >= 0
    assert cost.errors["decode"] > 0.05


def test_the_additional_costs_of_serving_are_fitted() -> None:
    """Steps take 1.3 times as long in service as in the sweep, and a request costs what no prefill alone shows."""
    served = replace(TRUE, decode_seconds=(0.013, 0.0325), kv_token_seconds=2.6e-6, request_seconds=5e-3)
    measured = Calibration(16, 100_000)
    base = TRUE.base(16)
    measured.decoding = [Decoding(b, kv, base[b] + 2e-6 * kv) for b in (1, 4, 16) for kv in (10.0 * b, 500.0 * b)]
    measured.prefill = [Prefill(n * (t,), n * (1e-4 * t + 1e-8 * t * t)) for n in (1, 4) for t in (16, 64, 256, 512)]

    def run_of(median: float, **settings: Any) -> Serving:
        workload = Workload("test", (Part(median, 0.6),), 300, prompt_tokens=40, rollout_batch_size=6)
        true = replace(served, update_seconds=0.0, interrupt_seconds=0.0)
        return Serving(workload, 2, settings, Serving(workload, 2, settings, 0.0).predicted(true, "recompute"))

    measured.serving = [run_of(median, partial_rollout=False) for median in (10, 100)]
    measured.held_out = [run_of(50, over_sampling_batch_size=12)]
    cost = measured.fit("test")
    np.testing.assert_allclose(cost.base(16)[1:], served.base(16)[1:], rtol=1e-6)
    assert cost.kv_token_seconds == pytest.approx(served.kv_token_seconds)
    assert cost.request_seconds == pytest.approx(served.request_seconds)
    assert cost.errors["held out"] < 1e-6


def test_the_sweep_recovers_the_known_costs_of_an_engine() -> None:
    """The whole sweep, against a simulated engine and its clock."""

    async def main() -> Calibration:
        clock = asyncio.get_running_loop().time
        endless = Workload("endless", (Part(1e9, 0.01),), max_tokens=10**9, prompt_tokens=8)
        engine = SimulatedEngine(TRUE, endless, stream_seconds=0.003)
        return await calibrate(engine, engine.update_weights, longest=400, steps=16, clock=clock)

    found = run(main()).fit("simulated")
    np.testing.assert_allclose(found.base(16)[1:], TRUE.base(16)[1:], rtol=0.03)
    assert found.kv_token_seconds == pytest.approx(TRUE.kv_token_seconds, rel=0.1)
    assert found.prefill_token_seconds == pytest.approx(TRUE.prefill_token_seconds, rel=0.15)
    assert found.update_seconds == pytest.approx(0.7)
    assert found.interrupt_seconds == pytest.approx(0.05)
    assert max(found.errors.values()) < 0.03


def test_a_context_too_short_for_the_sweep_is_an_error_and_no_endless_wait() -> None:
    async def main() -> None:
        endless = Workload("endless", (Part(1e9, 0.01),), max_tokens=10**9, prompt_tokens=8)
        engine = SimulatedEngine(TRUE, endless, stream_seconds=0.003)
        engine.capacity = replace(engine.capacity, context_length=48)
        await calibrate(engine, engine.update_weights, longest=400, steps=64, clock=asyncio.get_running_loop().time)

    with pytest.raises(EngineError, match="give the engine a longer context"):
        run(main())
