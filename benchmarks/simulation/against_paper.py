"""april against the reference's policy, on the simulator.

The reference's policy: a fixed N', no staleness bound, the groups that are complete first, unfinished samples in the
order of their arrival, KV caches recomputed after each update. april's policy at the same N' under a bound, KV caches
kept. All arms have the same engine, prompts and lengths.

    python benchmarks/simulation/against_paper.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from arms import BOUND, ceiling, figures, measure, save

from april.simulation.workload import WORKLOADS

RATIOS = (1.5, 2, 3)
SEED = 101


def arms(batch_size: int) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {"synchronous": {"partial_rollout": False}}
    for ratio in RATIOS:
        count = {"over_sampling_batch_size": round(ratio * batch_size)}
        made[f"paper {ratio:g}"] = {**count, "max_staleness": None, "first_come": True}
        made[f"ours {ratio:g}, keep, oldest"] = {**count, "max_staleness": BOUND, "on_update": "keep"}
    made["ours 2, recompute, oldest"] = {"over_sampling_batch_size": 2 * batch_size, "max_staleness": BOUND}
    auto = {"over_sampling_batch_size": "auto", "max_staleness": BOUND}
    made["ours auto, keep, oldest"] = {**auto, "on_update": "keep"}
    return made


def at_staleness(points: list[tuple[float, float]], staleness: float) -> float:
    """Consumed tokens/s at a mean staleness, on the line through (staleness, rate) points; flat beyond the last."""
    return float(np.interp(staleness, *zip(*sorted(points), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--keep", action="store_true", help="measure what is not in the file yet, and the automatic N'")
    args = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in args.workloads:
        top = ceiling(WORKLOADS[name])
        known = results[name]["arms"] if args.keep and name in results else {}
        found: dict[str, Any] = {}
        for arm, settings in arms(WORKLOADS[name].rollout_batch_size).items():
            fixed = known.get(arm) if "auto" not in arm else None
            made = fixed or figures(measure(name, SEED, **settings))
            found[arm] = {**made, "share_of_ceiling": made["consumed_tokens_per_second"] / top}
        ours = [found["synchronous"], *(found[f"ours {ratio:g}, keep, oldest"] for ratio in RATIOS)]
        line = [(arm["mean_staleness"], arm["consumed_tokens_per_second"]) for arm in ours]
        gains = {
            f"{ratio:g}": at_staleness(line, (paper := found[f"paper {ratio:g}"])["mean_staleness"])
            / paper["consumed_tokens_per_second"]
            for ratio in RATIOS
        }
        results[name] = {"ceiling": top, "ours_to_paper_at_equal_staleness": gains, "arms": found}
        save(__file__, results)
        print(name, {ratio: f"{gain:.3f}" for ratio, gain in gains.items()})
        for arm, made in found.items():
            print(
                f"    {arm:28s} {made['consumed_tokens_per_second']:6.0f} tokens/s, {made['share_of_ceiling']:4.0%} of "
                f"the ceiling, staleness {made['mean_staleness']:.2f}, at most {made['max_staleness']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
