"""Admission that tunes itself against every fixed N', on the simulator.

Each workload runs with each N' of a sweep and with N' chosen automatically, under the same bound, over the same
prompts and lengths, once for each seed. The bar: consumed tokens/s within 5 % of the best N' of that seed's sweep, mean
staleness no higher than that N' has, never over the bound, nothing discarded (the scheduler asserts the last two at
every step). No setting of april was chosen on these seeds.

    python benchmarks/simulation/auto_admission.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from arms import BOUND, figures, measure, save

from april.simulation.workload import WORKLOADS

RATIOS = (1.25, 1.5, 2, 2.5, 3, 4, 6)
SEEDS = (101, 102, 103)


def compare(auto: dict[str, Any], sweep: dict[str, Any]) -> dict[str, Any]:
    """The automatic choice against the best fixed N' in consumed tokens/s; `generated` is the same comparison in
    tokens sampled, which excludes tokens of samples that were in flight before the counted steps."""
    ratio, best = max(sweep.items(), key=lambda item: item[1]["consumed_tokens_per_second"])
    most = max(arm["generated_tokens_per_second"] for arm in sweep.values())
    share = auto["consumed_tokens_per_second"] / best["consumed_tokens_per_second"]
    fresh = auto["mean_staleness"] <= best["mean_staleness"] and auto["max_staleness"] <= BOUND
    return {
        "best_fixed_ratio": float(ratio),
        "best_consumed_tokens_per_second": best["consumed_tokens_per_second"],
        "staleness_of_best": best["mean_staleness"],
        "throughput_against_best": share,
        "generated_against_most_generated": auto["generated_tokens_per_second"] / most,
        "staleness": auto["mean_staleness"],
        "max_staleness": auto["max_staleness"],
        "passed": bool(share >= 0.95 and fresh),
    }


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Medians over the seeds, with the minima and maxima of the figures that have a bar."""
    found = [run["comparison"] for run in runs.values() if "comparison" in run]
    middle = {key: median(one[key] for one in found) for key in found[0] if key != "passed"}
    shares = [one["throughput_against_best"] for one in found]
    spread = {"throughput_against_best_range": [min(shares), max(shares)]}
    return {**middle, **spread, "seeds_passed": sum(one["passed"] for one in found), "seeds": len(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--fixed", action="store_true", help="measure the sweeps only")
    parser.add_argument("--keep-sweep", action="store_true", help="measure the automatic choice anew, and nothing else")
    args = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    for seed in args.seeds:
        for name in args.workloads:
            measured: dict[str, Any] = {}
            if not args.keep_sweep:
                measured["fixed"] = {}
                for ratio in RATIOS:
                    target = round(ratio * WORKLOADS[name].rollout_batch_size)
                    outcome = measure(name, seed, over_sampling_batch_size=target, max_staleness=BOUND)
                    measured["fixed"][f"{ratio:g}"] = figures(outcome)
            if not args.fixed:
                outcome = measure(name, seed, over_sampling_batch_size="auto", max_staleness=BOUND)
                measured["auto"] = {**figures(outcome), "targets": [step.target for step in outcome.steps]}
            # Read again each time: the script may run for other workloads or seeds at the same time.
            results = json.loads(path.read_text())["results"] if path.exists() else {}
            runs = results.setdefault(name, {"runs": {}})["runs"]
            run = runs[str(seed)] = {**runs.get(str(seed), {}), **measured}
            if run.keys() >= {"auto", "fixed"}:
                found = run["comparison"] = compare(run["auto"], run["fixed"])
                results[name]["summary"] = summary(runs)
                print(
                    f"{name:17s} seed {seed}: best N'/N = {found['best_fixed_ratio']:g}, "
                    f"{found['best_consumed_tokens_per_second']:6.0f} tokens/s, staleness "
                    f"{found['staleness_of_best']:.2f}; auto {found['throughput_against_best']:6.1%}, staleness "
                    f"{found['staleness']:.2f}, at most {found['max_staleness']}; last N' {run['auto']['targets'][-1]}",
                    flush=True,
                )
            save(__file__, results)


if __name__ == "__main__":
    main()
