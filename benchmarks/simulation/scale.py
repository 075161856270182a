"""Duration of large simulations: engines of 256 slots, all of them filled.

N' x G is the number of slots and N half of N', so that with 1,024 engines every step has 262,144 samples in flight and
trains on half of them. One process, one core. The aim is 1,024 engines and 50 steps in a minute, 1.2 s a step.

    OMP_NUM_THREADS=1 python benchmarks/simulation/scale.py
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import simulate
from april.simulation.workload import WORKLOADS


def measure(engines: int, slots: int, steps: int) -> dict[str, Any]:
    groups = engines * slots // WORKLOADS["lognormal"].n_samples_per_prompt
    workload = dataclasses.replace(WORKLOADS["lognormal"], rollout_batch_size=groups // 2)
    cost = roofline(GPUS["mi300x"], MODELS["qwen3-8b"], Roofline(slots=slots))
    began, cpu = time.perf_counter(), time.process_time()
    outcome = simulate(
        workload,
        cost,
        replicas=engines,
        steps=steps,
        warm_up=steps // 4,
        over_sampling_batch_size=groups,
        resolution=0.25,
    )
    cpu = time.process_time() - cpu
    return {
        "engines": engines,
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": cpu,
        "cpu_seconds_per_step": cpu / steps,
        "simulated_seconds": sum(step.seconds for step in outcome.steps),
        "simulated_tokens": sum(step.sampled_tokens for step in outcome.steps),
        "occupancy": outcome.occupancy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--steps", type=int, nargs="+", default=[50], help="for each of --engines, or for all")
    args = parser.parse_args()
    steps = args.steps if len(args.steps) > 1 else args.steps * len(args.engines)
    sizes = []
    for engines, count in zip(args.engines, steps, strict=True):
        sizes.append(measure(engines, args.slots, count))
        print(sizes[-1], flush=True)
    print(save(__file__, {"settings": vars(args), "sizes": sizes}))


if __name__ == "__main__":
    main()
