"""Spread of forecasts of an N' around their mean: the noise that automatic N' averages over its plans.

Random workloads (`random_workloads.py`), the true costs of the engine, and new lengths for each forecast. The spread is
the standard deviation over the draws, relative to the mean of the forecasts.

    python benchmarks/simulation/forecast_noise.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from random_workloads import Case

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

from april.rollout.admission.forecast import Conditions
from april.rollout.admission.rates import EngineRates

SEEDS = (5, 1005, 1007, 1023)
STEPS = (48, 96, 384)
DRAWS = 8


def conditions(case: Case, steps: int, draw: int) -> Conditions:
    cost, workload = case.cost, case.workload
    group, above_half = workload.n_samples_per_prompt, 2 / cost.slots
    rates, prefill = EngineRates(), cost.prefill_token_seconds
    crowded = max(cost.decode_seconds[-1] - cost.decode_seconds[0], 0.0) * above_half
    resumed = prefill if case.on_update == "recompute" else 0.0
    rates.costs = np.array(
        [cost.decode_seconds[0], 0, crowded, cost.kv_token_seconds, prefill / group, resumed, prefill]
    )
    count = workload.rollout_batch_size * (steps + 6) * group
    own, rng = np.random.default_rng(draw), np.random.default_rng(draw + 1000)
    prompts = np.repeat(own.integers(1 << 40, size=count // group), group)
    lengths = workload.lengths(prompts, rng.integers(1 << 62, size=count).astype(np.uint64)).astype(float)
    return Conditions(
        lengths.reshape(-1, group),
        workload.rollout_batch_size,
        cost.slots,
        None,
        case.bound,
        workload.prompt_tokens,
        rates,
        cost.interrupt_seconds,
        cost.update_seconds,
    )


def spread_of(case: Case, target: int, steps: int) -> dict[str, float]:
    drawn = [conditions(case, steps, draw).forecast(target, steps, steps // 3) for draw in range(DRAWS)]
    found = np.array([forecast.consumed_tokens_per_second for forecast in drawn])
    return {"mean": round(float(found.mean()), 1), "spread": round(float(found.std() / found.mean()), 4)}


def main() -> None:
    workloads: dict[str, Any] = {}
    for seed in SEEDS:
        case = Case.draw(seed)
        size = case.workload.rollout_batch_size
        targets = (size, 2 * size, size * (case.bound + 1))
        workloads[str(seed)] = {
            f"N' = {target // size} N": {f"{steps} steps": spread_of(case, target, steps) for steps in STEPS}
            for target in targets
        }
        print(seed, workloads[str(seed)], flush=True)
    save(__file__, {"draws": DRAWS, "workloads": workloads})


if __name__ == "__main__":
    main()
