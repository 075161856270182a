"""The fourth study: the cost in accuracy of generation during training. `protocol.md` lists the runs and their reasons;
each run adds a JSON line to `overlap.jsonl` when it ends, and `overlap_analysis.json` contains the results.

Invariants: as in `study.py`; and the arms of a seed run one after another.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/overlap.py --runs 4
    python benchmarks/accuracy/overlap.py --runs 0          # only the analysis
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from analysis import as_ratio, bootstrap, final_accuracy, machine
from comparison import Runs, differences, runs_of, sign_flip
from remedies import Run, observe_moments
from remedies_analysis import curve, ratios_to, target_of
from study import HERE, recorded, run_cells

UPDATES = ("recompute", "keep")
ARMS: dict[str, dict[str, Any]] = {
    f"{arm}, {on_update}": {
        "engine.own_process": True,
        "engine.on_update": on_update,
        "trainer.overlap": arm == "overlapping",
    }
    for on_update in UPDATES
    for arm in ("alternating", "overlapping")
}
RATE = 1.7e-4
SEEDS = range(600, 608)


@dataclass(frozen=True)
class OverlapRun(Run):
    """One run of the fourth study."""

    arms = ARMS


def planned() -> list[OverlapRun]:
    """The protocol's runs in its order."""
    return [OverlapRun("best", "factors", "grpo", arm, RATE, seed) for seed in SEEDS for arm in ARMS]


def analyse(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Overlapping minus alternating, paired by seed."""
    of = {arm: runs_of(records, SEEDS, arm=arm) for arm in ARMS}
    found: dict[str, Any] = {}
    each: list[list[float]] = []
    for on_update in UPDATES:
        alternating, overlapping = of[f"alternating, {on_update}"], of[f"overlapping, {on_update}"]
        own = differences(overlapping, alternating)
        each.append(own)
        samples = ratios_to(target_of(alternating), overlapping, alternating)["samples_to_target"]
        found[on_update] = {
            "difference": bootstrap(own),
            "p": sign_flip(own),
            "samples_to_target": as_ratio(bootstrap(samples)),
        }
    both = [float(np.mean(pair)) for pair in zip(*each, strict=True)]  # of a seed: the two are not independent
    return {
        "machine": machine(),
        "runs": len(records),
        "cpu_seconds": round(sum(record["cpu_seconds"] for record in records)),
        "overlapping_minus_alternating": {
            **found,
            "both": {"difference": bootstrap(both), "p": sign_flip(both)},
        },
        "arms": {arm: said(runs) for arm, runs in of.items() if runs},
    }


def said(runs: Runs) -> dict[str, Any]:
    """What the runs of an arm have in the mean."""
    each = [runs[seed] for seed in sorted(runs)]
    means = ("mean_staleness", "off_policy_token_share", "consumed_tokens", "generated_tokens", "cpu_seconds")
    return {
        "by_seed": [round(final_accuracy(run), 4) for run in each],
        "curve": curve(runs),
        **{name: round(float(np.mean([run[name] for run in each])), 3) for name in means},
        "max_staleness_seen": max(run["max_staleness_seen"] for run in each),
        "overlap_seconds": round(float(np.mean([run.get("overlap_seconds", 0.0) for run in each])), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "overlap.jsonl")
    parser.add_argument("--runs", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    observe_moments()
    if arguments.runs != 0:
        run_cells(planned(), arguments.output, arguments.runs)
    (HERE / "overlap_analysis.json").write_text(json.dumps(analyse(recorded(arguments.output)), indent=1) + "\n")


if __name__ == "__main__":
    main()
