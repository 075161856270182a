"""The third study: partial rollouts whose unfinished samples are redrafted, against synchronous and partial ones.
`protocol.md` lists the runs and their reasons; each run adds a JSON line to `redraft.jsonl` when it ends, and
`redraft_analysis.json` contains the results.

Invariants: as in `study.py`; and the arms of a seed run one after another, so that their seconds can be compared.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/redraft.py --runs 3
    python benchmarks/accuracy/redraft.py --runs 0          # only the analysis
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from analysis import as_ratio, bootstrap, final_accuracy, machine
from comparison import differences, runs_of, sign_flip
from remedies import TASK_RATE, Run, observe_moments
from remedies_analysis import curve, log_ratios, ratios_to, spent, target_of
from study import HERE, recorded, run_cells

ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"rollout.partial_rollout": False, "rollout.over_sampling_batch_size": 8},
    "partial": {},
    "redraft": {"engine.on_update": "redraft"},
    "redraft-window": {"engine.on_update": "redraft", "rollout.admission_window": 8},
}
"""The last one was added when the first 72 runs had been looked at (`protocol.md`)."""
BEFORE = tuple(ARMS)[:3]
RATE, HIGH = 1.7e-4, 5.1e-4
"""The best rate of synchronous runs on `factors` in the second study, and three times that."""
SEEDS = range(500, 508)


@dataclass(frozen=True)
class RedraftRun(Run):
    """One run of the third study."""

    arms = ARMS

    @property
    def key(self) -> str:
        return f"{super().key}{'-window' if self.stage == 'window' else ''}"


def planned() -> Iterator[RedraftRun]:
    """The protocol's runs in its order."""
    tasks = [(task, float(f"{scale * RATE:.2g}")) for task, scale in TASK_RATE.items()]
    yield from _each("best", "grpo", tasks, BEFORE)
    yield from _each("window", "grpo", tasks, ("synchronous", "redraft-window"))
    yield from _each("high", "grpo", [("factors", HIGH)])
    for algorithm in ("dapo", "gspo"):
        yield from _each("best", algorithm, tasks)


def _each(
    stage: str, algorithm: str, tasks: Sequence[tuple[str, float]], arms: Sequence[str] = tuple(ARMS)
) -> Iterator[RedraftRun]:
    for seed in SEEDS:
        for task, rate in tasks:
            yield from (RedraftRun(stage, task, algorithm, arm, rate, seed) for arm in arms)


class Pool:
    """Combined results of the pairs of several cells at the best rate."""

    def __init__(self) -> None:
        self.arms: dict[str, dict[str, list[float]]] = {
            arm: {"difference": [], "samples": [], "cpu": [], "whole": []} for arm in ARMS
        }
        self.over_partial: list[float] = []
        self.over_redraft: list[float] = []

    def said(self) -> dict[str, Any]:
        return {
            **{arm: said({}, found) for arm, found in self.arms.items()},
            "redraft_minus_partial": bootstrap(self.over_partial),
            "window_minus_redraft": bootstrap(self.over_redraft),
        }


def analyse(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each arm against synchronous runs of its seed: by task, algorithm and rate, by algorithm, and over all."""
    cells, over_all, pools = [], Pool(), {algorithm: Pool() for algorithm in ("grpo", "dapo", "gspo")}
    for stage, task, algorithm in dict.fromkeys((run.stage, run.task, run.algorithm) for run in planned()):
        chosen = {"stage": stage, "task": task, "algorithm": algorithm}
        of = {arm: runs_of(records, SEEDS, arm=arm, **chosen) for arm in ARMS}
        target = target_of(of["synchronous"])
        redrafted = runs_of(records, SEEDS, arm="redraft", **{**chosen, "stage": "best"})
        for pool in (over_all, pools[algorithm]):
            if stage == "best":
                pool.over_partial += differences(of["redraft"], of["partial"])
            if stage != "high":
                pool.over_redraft += differences(of["redraft-window"], redrafted)
        for arm, own in of.items():
            difference = differences(own, of["synchronous"])
            costs = ratios_to(target, own, of["synchronous"])
            found = {
                "difference": difference,
                "samples": costs["samples_to_target"],
                "cpu": costs["cpu_seconds_to_target"],
                "whole": log_ratios(own, of["synchronous"], spent),
            }
            if stage == "best" or (stage == "window" and arm == "redraft-window"):
                for pool in (over_all, pools[algorithm]):
                    for name, values in found.items():
                        pool.arms[arm][name] += values
            ends = [round(final_accuracy(own[seed]), 4) for seed in sorted(own)]
            cells.append({**chosen, "arm": arm, "target": target, "runs": len(own), "by_seed": ends} | said(own, found))
    return {
        "machine": machine(),
        "runs": len(records),
        "cpu_seconds": round(sum(record["cpu_seconds"] for record in records)),
        "over_all": over_all.said(),
        "by_algorithm": {algorithm: pool.said() for algorithm, pool in pools.items() if pool.over_partial},
        "cells": cells,
    }


def said(own: Mapping[int, Mapping[str, Any]], found: Mapping[str, list[float]]) -> dict[str, Any]:
    runs = list(own.values())
    return {
        **({"curve": curve(own), "staleness": float(np.mean([r["mean_staleness"] for r in runs]))} if runs else {}),
        "pairs": len(found["difference"]),
        "minus_synchronous": bootstrap(found["difference"]),
        "p": sign_flip(found["difference"]) if runs else None,
        "samples_to_target": as_ratio(bootstrap(found["samples"])),
        "cpu_seconds_to_target": as_ratio(bootstrap(found["cpu"])),
        "cpu_seconds": as_ratio(bootstrap(found["whole"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "redraft.jsonl")
    parser.add_argument("--runs", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    observe_moments()
    if arguments.runs != 0:
        run_cells(list(planned()), arguments.output, arguments.runs)
    analysis = json.dumps(analyse(recorded(arguments.output)), indent=1)
    (HERE / "redraft_analysis.json").write_text(analysis + "\n")


if __name__ == "__main__":
    main()
