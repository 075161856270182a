"""What the scheduler's remedies cost in throughput, and how much of the selection by completion time they take away.

In simulation: Qwen3-4B on one MI300X by roofline, N = 16 groups of 8, lognormal lengths (median 2,000, sigma 1, cut off
at 16,384), a slot for each sample of 2 N groups. Ratios are of consumed tokens/s, medians over seeds with the least and
the most; `first_step_length` is the mean length of what the first step trains on, in mean lengths of the workload.

    python benchmarks/accuracy/remedies_cost.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread

from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import Outcome, simulate
from april.simulation.workload import Part, Workload

N = 16
COST = roofline(GPUS["mi300x"], MODELS["qwen3-4b"], Roofline(slots=2 * N * 8))
ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"partial_rollout": False},
    "partial": {},
    "window 4 N": {"admission_window": 4 * N},
    "window 2 N": {"admission_window": 2 * N},
    "window 1.5 N": {"admission_window": 3 * N // 2},
    "window N": {"admission_window": N},
    "first step synchronous": {"ramp_steps": 1},
    "ramp over 4 steps": {"ramp_steps": 4},
}


def run(settings: dict[str, Any], steps: int, seed: int) -> Outcome:
    lengths = Workload("remedies", (Part(2000, 1.0),), rollout_batch_size=N, prompt_tokens=150, seed=seed)
    own = settings if "partial_rollout" in settings else {"over_sampling_batch_size": 2 * N, **settings}
    return simulate(lengths, COST, steps=steps, warm_up=0, seed=seed, resolution=0.2, **own)


def rate(outcome: Outcome, first: int, last: int) -> float:
    """Consumed tokens per second of rollouts, over some of the steps."""
    steps = outcome.steps[first:last]
    return sum(s.consumed_tokens for s in steps) / sum(s.seconds + s.update_seconds for s in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    steps, seeds = arguments.steps, range(arguments.seeds)
    outcomes = {arm: [run(settings, steps, seed) for seed in seeds] for arm, settings in ARMS.items()}
    typical = [float(outcome.lengths.mean()) for outcome in outcomes["synchronous"]]
    found = {}
    for arm, own in outcomes.items():

        def ratio(other: str, first: int, last: int, own: list[Outcome] = own) -> dict[str, float]:
            return spread(
                [rate(a, first, last) / rate(b, first, last) for a, b in zip(own, outcomes[other], strict=True)]
            )

        found[arm] = {
            "to_synchronous": ratio("synchronous", 10, steps),
            "to_partial": ratio("partial", 10, steps),
            "to_partial_in_the_first_10_steps": ratio("partial", 0, 10),
            "mean_staleness": round(float(np.mean([s.staleness.mean() for o in own for s in o.steps[10:]])), 3),
            "max_staleness": max(int(s.staleness.max()) for o in own for s in o.steps),
            "first_step_length": spread(
                [float(o.steps[0].lengths.mean()) / t for o, t in zip(own, typical, strict=True)]
            ),
        }
        told = found[arm]
        print(f"{arm:24} {told['to_synchronous']['median']:.2f} {told['to_partial']['median']:.2f}", told, flush=True)
    save(__file__, {"steps": steps, "arms": found})


if __name__ == "__main__":
    main()
