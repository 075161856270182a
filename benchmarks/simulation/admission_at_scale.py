"""Automatic admission on 64 engines: does its additional staleness bring throughput?

256 prompts of 8 samples on 64 x MI300X (Qwen3-8B by its roofline, 64 slots each), lognormal lengths up to 16,384,
bound 5. Each fixed N' and the automatic choice, over the same prompts and lengths, with KV caches recomputed after each
update.

    OMP_NUM_THREADS=1 python benchmarks/simulation/admission_at_scale.py
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import simulate
from april.simulation.workload import WORKLOADS

TARGETS: tuple[int | str, ...] = (256, 320, 384, 512, 640, 768, 1024, 1536, "auto")
ENGINES, SLOTS, STEPS, WARM_UP = 64, 64, 36, 12


def measure(target: int | str) -> dict[str, Any]:
    workload = dataclasses.replace(
        WORKLOADS["lognormal"], rollout_batch_size=256, n_samples_per_prompt=8, max_tokens=16_384
    )
    outcome = simulate(
        workload,
        roofline(GPUS["mi300x"], MODELS["qwen3-8b"], Roofline(slots=SLOTS)),
        replicas=ENGINES,
        steps=STEPS,
        warm_up=WARM_UP,
        over_sampling_batch_size=target,
        max_staleness=5,
        resolution=1.0,
    )
    return {
        "consumed_tokens_per_second": outcome.consumed_tokens_per_second,
        "generated_tokens_per_second": outcome.generated_tokens_per_second,
        "mean_staleness": outcome.mean_staleness,
        "occupancy": outcome.occupancy,
        "targets": [step.target for step in outcome.steps],
    }


def main() -> None:
    found: dict[str, Any] = {}
    for target in TARGETS:
        one = found[str(target)] = measure(target)
        print(
            f"N' = {target}: {one['consumed_tokens_per_second']:,.0f} tokens/s, staleness {one['mean_staleness']:.2f}, "
            f"occupancy {one['occupancy']:.0%}, last N' {one['targets'][-1]}",
            flush=True,
        )
        save(__file__, found)


if __name__ == "__main__":
    main()
