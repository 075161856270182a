"""How long a large simulation takes: 1,024 engines of 256 slots, all of them filled, by default for 50 steps.

N' x G is the number of slots and N half of N', so that every step has 262,144 samples under way and trains on half of
them. One process, one core.

    OMP_NUM_THREADS=1 python benchmarks/simulation/scale.py
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import simulate
from april.simulation.workload import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    groups = args.engines * args.slots // WORKLOADS["lognormal"].n_samples_per_prompt
    workload = dataclasses.replace(WORKLOADS["lognormal"], rollout_batch_size=groups // 2)
    cost = roofline(GPUS["mi300x"], MODELS["qwen3-8b"], Roofline(slots=args.slots))
    began, cpu = time.perf_counter(), time.process_time()
    outcome = simulate(
        workload,
        cost,
        replicas=args.engines,
        steps=args.steps,
        warm_up=args.steps // 4,
        over_sampling_batch_size=groups,
        resolution=0.25,
    )
    results = {
        "settings": vars(args),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "simulated_seconds": sum(step.seconds for step in outcome.steps),
        "simulated_tokens": sum(step.sampled_tokens for step in outcome.steps),
        "occupancy": outcome.occupancy,
    }
    print(results)
    print(save(__file__, results))


if __name__ == "__main__":
    main()
