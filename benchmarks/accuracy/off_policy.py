"""A check that the paper leaves open: PPO with a critic, and REINFORCE, when about 40 % of the tokens are off-policy.

REINFORCE (RLOO with one update a step, whose ratio differs from 1 for stale tokens only) is on-policy by definition.
GRPO uses the group's mean as a baseline; PPO's critic learns from the same stale data. Each trains on `factors` at
N' = 1.5 N, with the default correction and with none, and in synchronous runs of the same seed.

Fixed before the first run: the rate is the one of 6e-5, 1.7e-4 and 5e-4 at which the synchronous runs of seeds 600 and
601 end highest, algorithm by algorithm; then eight fresh seeds. Differences of final accuracy are paired by seed.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/off_policy.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from analysis import as_ratio, bootstrap, machine
from comparison import differences, mean_accuracy, runs_of
from remedies import Run
from remedies_analysis import curve, ratios_to, target_of
from study import HERE, recorded, run_cells

from april.config.checking import check_recipe
from april.config.recipe import Recipe

RATES = (6e-5, 1.7e-4, 5e-4)
SELECT, SEEDS = range(600, 602), range(610, 618)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.kl_coef": 0.0},
    "rloo": {"algorithm.kl_coef": 0.0, "training.updates_per_step": 1},
}
ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"rollout.partial_rollout": False, "rollout.over_sampling_batch_size": 8},
    "partial": {"rollout.over_sampling_batch_size": 12},
    "uncorrected": {"rollout.over_sampling_batch_size": 12, "algorithm.correction": "none"},
}


@dataclass(frozen=True)
class OffPolicyRun(Run):
    """One run."""

    arms = ARMS

    def recipe(self, output: Path) -> Recipe:
        recipe = super().recipe(output)
        for name, value in ALGORITHMS[self.algorithm].items():
            section, setting = name.split(".")
            setattr(getattr(recipe, section), setting, value)
        check_recipe(recipe)
        return recipe

    def more(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}


def planned(records: Sequence[Mapping[str, Any]]) -> Iterator[OffPolicyRun]:
    """The runs in order, as far as they follow from the runs that have ended."""
    for seed in SELECT:
        for algorithm in ALGORITHMS:
            yield from (OffPolicyRun("select", "factors", algorithm, "synchronous", rate, seed) for rate in RATES)
    best = {algorithm: best_rate(records, algorithm) for algorithm in ALGORITHMS}
    for seed in SEEDS:
        for algorithm, rate in best.items():
            if rate is not None:
                yield from (OffPolicyRun("pair", "factors", algorithm, arm, rate, seed) for arm in ARMS)


def best_rate(records: Sequence[Mapping[str, Any]], algorithm: str) -> float | None:
    """None while not all have been tried."""
    tried = {rate: runs_of(records, SELECT, stage="select", algorithm=algorithm, rate=rate) for rate in RATES}
    if any(len(runs) < len(SELECT) for runs in tried.values()):
        return None
    return max(RATES, key=lambda rate: mean_accuracy(tried[rate]))


def analyse(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = []
    for algorithm in ALGORITHMS:
        rate = best_rate(records, algorithm)
        of = {arm: runs_of(records, SEEDS, stage="pair", algorithm=algorithm, arm=arm) for arm in ARMS}
        target = target_of(of["synchronous"])
        for arm, runs in of.items():
            if not runs:
                continue
            costs = ratios_to(target, runs, of["synchronous"])
            off_policy = float(np.mean([run["off_policy_token_share"] for run in runs.values()]))
            staleness = float(np.mean([run["mean_staleness"] for run in runs.values()]))
            found.append(
                {
                    "algorithm": algorithm,
                    "rate": rate,
                    "arm": arm,
                    "runs": len(runs),
                    "accuracy": round(mean_accuracy(runs), 4),
                    "curve": curve(runs),
                    "off_policy_token_share": round(off_policy, 3),
                    "staleness": round(staleness, 3),
                    "minus_synchronous": bootstrap(differences(runs, of["synchronous"])),
                    "cpu_seconds_to_target": as_ratio(bootstrap(costs["cpu_seconds_to_target"])),
                }
            )
    selected = {
        algorithm: {
            f"{rate:g}": round(mean_accuracy(runs), 4)
            for rate in RATES
            if (runs := runs_of(records, SELECT, stage="select", algorithm=algorithm, rate=rate))
        }
        for algorithm in ALGORITHMS
    }
    return {"machine": machine(), "runs": len(records), "rates": selected, "arms": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "off_policy.jsonl")
    parser.add_argument("--runs", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    path, limit = arguments.output, arguments.runs
    while limit != 0 and run_cells(list(planned(recorded(path))), path, limit) and limit is None:
        pass  # the pairs' rate follows from the selection
    analysis = json.dumps(analyse(recorded(path)), indent=1)
    (HERE / "off_policy.json").write_text(analysis + "\n")


if __name__ == "__main__":
    main()
