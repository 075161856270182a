"""Admission that tunes itself against every fixed N', on the simulator.

Each workload runs with each N' of a sweep and with N' chosen automatically, under the same bound, over the same
prompts and lengths. The bar: consumed tokens/s within 5 % of the best N' of the sweep, mean staleness no higher than
that N' has, never over the bound, nothing discarded (the scheduler asserts the last two at every step).

    python benchmarks/simulation/auto_admission.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from arms import BOUND, figures, measure, save

from april.simulation.workload import WORKLOADS

RATIOS = (1.25, 1.5, 2, 2.5, 3, 4, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--keep-sweep", action="store_true", help="measure the automatic choice anew, and nothing else")
    args = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in args.workloads:
        batch_size = WORKLOADS[name].rollout_batch_size
        sweep = results.get(name, {}).get("fixed", {}) if args.keep_sweep else {}
        for ratio in RATIOS:
            if f"{ratio:g}" not in sweep:
                outcome = measure(name, over_sampling_batch_size=round(ratio * batch_size), max_staleness=BOUND)
                sweep[f"{ratio:g}"] = figures(outcome)
        outcome = measure(name, over_sampling_batch_size="auto", max_staleness=BOUND)
        auto = {**figures(outcome), "targets": [step.target for step in outcome.steps]}
        best_ratio, best = max(sweep.items(), key=lambda item: item[1]["consumed_tokens_per_second"])
        results[name] = {
            "auto": auto,
            "fixed": sweep,
            "best_fixed_ratio": float(best_ratio),
            "throughput_against_best": auto["consumed_tokens_per_second"] / best["consumed_tokens_per_second"],
            "staleness_of_best": best["mean_staleness"],
        }
        passed = results[name]["throughput_against_best"] >= 0.95 and auto["mean_staleness"] <= best["mean_staleness"]
        results[name]["passed"] = bool(passed and auto["max_staleness"] <= BOUND)
        save(__file__, results)
        print(
            f"{name:17s} best N'/N = {best_ratio:>4s}: {best['consumed_tokens_per_second']:6.0f} tokens/s, staleness "
            f"{best['mean_staleness']:.2f}; auto {results[name]['throughput_against_best']:6.1%}, staleness "
            f"{auto['mean_staleness']:.2f}, at most {auto['max_staleness']}; last N' {auto['targets'][-1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
