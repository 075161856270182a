"""Checks that the paper leaves open, in virtual time: memory by N', and responses of 100 and of 50,000 tokens.

- `memory`: waiting samples after a step, peak of the KV cache, and cost of eviction (tokens prefilled for each sampled
  token), by N'/N, with room for all caches and with a sixth of it.
- `extremes`: nine responses of 100 tokens for each of 50,000: throughput, staleness, and whether all started long
  responses are trained on.

    OMP_NUM_THREADS=1 python benchmarks/simulation/paper_checks.py
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from arms import COST
from record import save

from april.simulation.run import Outcome, simulate
from april.simulation.workload import WORKLOADS, Part, Workload

RATIOS = (1, 1.5, 2, 3, 6)
EXTREMES = Workload("extremes", (Part(100, 0.1, 0.9), Part(50_000, 0.1, 0.1)), max_tokens=65_536, correlation=0.6)
SMALL = dataclasses.replace(COST, kv_tokens=COST.kv_tokens // 6)
"""A sixth of the cache: what 256 slots hold of this workload hardly fits."""
TOKEN_BYTES = 72
"""Of a buffered token, see `april.training.memory_metrics`."""
KV_BYTES = 147_456
"""Of a token's keys and values: Qwen3-8B, 36 layers, 8 heads of 128, two bytes."""


def run(workload: Workload, ratio: float, steps: int, cost: Any = COST, **settings: Any) -> Outcome:
    batch = workload.rollout_batch_size
    how = {"partial_rollout": False} if ratio == 1 else {"over_sampling_batch_size": round(ratio * batch)}
    return simulate(workload, cost, steps=steps, warm_up=steps // 4, max_staleness=5, resolution=1.0, **how, **settings)


def memory(outcome: Outcome, cost: Any) -> dict[str, Any]:
    tokens = max(step.buffered_tokens for step in outcome.steps)
    sampled = sum(step.sampled_tokens for step in outcome.steps)
    return {
        "consumed_tokens_per_second": round(outcome.consumed_tokens_per_second),
        "mean_staleness": round(outcome.mean_staleness, 3),
        "occupancy": round(outcome.occupancy, 3),
        "buffered_tokens": tokens,
        "buffered_megabytes": round(tokens * TOKEN_BYTES / 1e6, 2),
        "kv_gigabytes": round(outcome.peak_kv * cost.kv_tokens * KV_BYTES / 1e9, 1),
        "peak_kv": round(outcome.peak_kv, 3),
        "preemptions": outcome.preemptions,
        "prefilled_tokens_per_sampled": round(outcome.prefilled_tokens / sampled, 3),
    }


def extremes(outcome: Outcome) -> dict[str, Any]:
    lengths = outcome.lengths
    first = outcome.steps[0].lengths
    return {
        "consumed_tokens_per_second": round(outcome.consumed_tokens_per_second),
        "step_seconds": round(outcome.rollout_seconds / len(outcome.counted), 1),
        "occupancy": round(outcome.occupancy, 3),
        "mean_staleness": round(outcome.mean_staleness, 3),
        "max_staleness": outcome.max_staleness,
        "long_share": round(float((lengths > 1000).mean()), 4),
        "long_share_of_the_first_step": round(float((first > 1000).mean()), 4),
        "mean_response_tokens": round(float(lengths.mean())),
    }


def main() -> None:
    found: dict[str, Any] = {"memory": {}, "extremes": {}}
    for name, cost in (("roomy", COST), ("a sixth of the cache", SMALL)):
        for keep in ("keep", "recompute"):
            rows = {
                f"{ratio:g}": memory(run(WORKLOADS["lognormal"], ratio, 24, cost, on_update=keep), cost)
                for ratio in RATIOS
            }
            found["memory"][f"{name}, {keep}"] = rows
            print(name, keep, rows, flush=True)
    found["extremes"] = {f"{ratio:g}": extremes(run(EXTREMES, ratio, 40, on_update="keep")) for ratio in RATIOS}
    print("extremes", found["extremes"], flush=True)
    save(__file__, found)


if __name__ == "__main__":
    main()
