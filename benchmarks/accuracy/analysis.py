"""Results of the cells of the accuracy study: `study.jsonl` in, `analysis.json`, `results.md` and two plots out.

Invariants:
- final accuracy is the mean of a run's last two evaluations, chosen before the study ran, since one alone is noisy;
- a task's target is half way between its warm start and the mean final accuracy of all its runs in both arms;
- arms are compared seed by seed;
- an interval is a percentile bootstrap of the mean over pairs of runs, 95 %. Few pairs make it too narrow rather than
  too wide.

    python benchmarks/accuracy/analysis.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import machine
from study import ALGORITHMS, CORRECTIONS, HERE, TASKS, recorded

STEP, SAMPLES, TOKENS, SECONDS, ACCURACY = range(5)
"""Columns of a record's evaluations."""

BREAKS = 0.05
"""A combination breaks if its accuracy is this far below the synchronous runs with the same seeds, and the whole
interval is below 0."""

Record = Mapping[str, Any]
Pairs = Mapping[tuple[str, str], Sequence[tuple[Record, Record]]]
"""Synchronous and partial runs of the same seed, by task and algorithm."""


def final_accuracy(record: Record) -> float:
    """The mean of the last two evaluations; 0 for a run that broke off."""
    if "error" in record:
        return 0.0
    return float(np.mean([evaluation[ACCURACY] for evaluation in record["evaluations"][-2:]]))


def final_accuracies(pairs: Sequence[tuple[Record, Record]]) -> dict[str, list[float]]:
    """Of both arms, pair by pair."""
    return {arm: [final_accuracy(pair[i]) for pair in pairs] for i, arm in enumerate(("synchronous", "partial"))}


def to_target(record: Record, target: float, column: int) -> float | None:
    """What `column` amounted to as the accuracy first reached `target`, between evaluations by a straight line.

    >>> to_target({"evaluations": [[0, 0, 0, 0.0, 0.5], [4, 100, 0, 0.0, 0.7]]}, 0.6, SAMPLES)
    50.0
    """
    for before, after in pairwise(record["evaluations"]):
        if before[ACCURACY] < target <= after[ACCURACY]:
            share = (target - before[ACCURACY]) / (after[ACCURACY] - before[ACCURACY])
            return round(before[column] + share * (after[column] - before[column]), 2)
    return None


def bootstrap(values: Sequence[float], resamples: int = 10_000) -> dict[str, Any]:
    """The mean with its 95 % interval; no interval for fewer than three values."""
    if not values:
        return {"mean": None, "low": None, "high": None, "pairs": 0}
    rng = np.random.default_rng(0)
    drawn = np.asarray(values)[rng.integers(len(values), size=(resamples, len(values)))].mean(axis=1)
    ends = [round(float(end), 4) for end in np.percentile(drawn, [2.5, 97.5])] if len(values) > 2 else [None, None]
    return {"mean": round(float(np.mean(values)), 4), "low": ends[0], "high": ends[1], "pairs": len(values)}


def as_ratio(logs: Mapping[str, Any]) -> dict[str, Any]:
    """An interval of log ratios as one of ratios."""
    ends = ("mean", "low", "high")
    return {n: round(float(np.exp(v)), 3) if n in ends and v is not None else v for n, v in logs.items()}


def pairs_of(records: Sequence[Record], grid: str = "main") -> Pairs:
    runs = {(r["task"], r["algorithm"], r["seed"], r["over_sampling"] > 1): r for r in records if r["grid"] == grid}
    pairs = defaultdict(list)
    for (task, algorithm, seed, partial), record in sorted(runs.items()):
        if not partial and (other := runs.get((task, algorithm, seed, True))):
            pairs[task, algorithm].append((record, other))
    return dict(pairs)


def targets_of(pairs: Pairs) -> dict[str, float]:
    """The accuracy of each task whose cost is compared."""
    targets = {}
    for task in TASKS:
        runs = [r for (of, _), pair in pairs.items() if of == task for both in pair for r in both]
        if runs:
            starts = np.mean([r["evaluations"][0][ACCURACY] for r in runs])
            targets[task] = round(float(starts + np.mean([final_accuracy(r) for r in runs])) / 2, 4)
    return targets


def compare(pairs: Pairs, targets: Mapping[str, float]) -> dict[str, Any]:
    """Partial against synchronous: the difference in final accuracy, and the ratios of what the target took."""

    def differences(of: Sequence[tuple[Record, Record]]) -> list[float]:
        return [final_accuracy(partial) - final_accuracy(synchronous) for synchronous, partial in of]

    def log_ratios(of: Sequence[tuple[Record, Record]], column: int) -> list[float]:
        taken = [tuple(to_target(r, targets[r["task"]], column) for r in pair) for pair in of]
        return [float(np.log(partial / synchronous)) for synchronous, partial in taken if partial and synchronous]

    ratios: dict[str, Callable[[Sequence[tuple[Record, Record]]], list[float]]] = {
        "samples_to_target": lambda of: log_ratios(of, SAMPLES),
        "generated_tokens_to_target": lambda of: log_ratios(of, TOKENS),
        "cpu_seconds_to_target": lambda of: log_ratios(of, SECONDS),
        "cpu_seconds": lambda of: [float(np.log(b["cpu_seconds"] / a["cpu_seconds"])) for a, b in of],
    }
    flat = [pair for of in pairs.values() for pair in of]
    reached = [sum(to_target(pair[i], targets[pair[i]["task"]], STEP) is not None for pair in flat) for i in (0, 1)]
    return {
        "accuracy_difference": bootstrap(differences(flat)),
        "ratios": {name: as_ratio(bootstrap(of(flat))) for name, of in ratios.items()},
        "runs_per_arm": len(flat),
        "reached_target": {"synchronous": reached[0], "partial": reached[1]},
    }


def main_grid(records: Sequence[Record]) -> dict[str, Any]:
    pairs = pairs_of(records)
    targets = targets_of(pairs)
    rows = []
    for (task, algorithm), of in pairs.items():
        arms = final_accuracies(of)
        rows.append(
            {
                "task": task,
                "algorithm": algorithm,
                **{arm: spread(values) for arm, values in arms.items()},
                "staleness": round(float(np.mean([partial["mean_staleness"] for _, partial in of])), 2),
                "off_policy_tokens": round(float(np.mean([p["off_policy_token_share"] for _, p in of])), 2),
                "clip_fraction": [
                    round(float(np.mean([p[i]["diagnostics"]["clip_fraction"] for p in of])), 4) for i in (0, 1)
                ],
                **compare({(task, algorithm): of}, targets),
            }
        )
    by = {
        name: {one: compare({k: v for k, v in pairs.items() if k[i] == one}, targets) for one in ones}
        for i, (name, ones) in enumerate({"task": TASKS, "algorithm": ALGORITHMS}.items())
    }
    return {"targets": targets, "rows": rows, "by": by, "all": compare(pairs, targets)}


def spread(values: Sequence[float]) -> dict[str, Any]:
    if not len(values):
        return {"mean": None, "min": None, "max": None, "runs": 0}
    ends = {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in ends.items()} | {"runs": len(values)}


def long_grid(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Partial against synchronous over three times the steps, and the same difference at each evaluation."""
    rows = []
    for (task, algorithm), of in pairs_of(records, "long").items():
        steps = [evaluation[STEP] for evaluation in of[0][0]["evaluations"]]
        ahead = [
            float(
                np.mean([partial["evaluations"][i][ACCURACY] - one["evaluations"][i][ACCURACY] for one, partial in of])
            )
            for i in range(len(steps))
        ]
        arms = final_accuracies(of)
        rows.append(
            {
                "task": task,
                "algorithm": algorithm,
                **{arm: spread(values) for arm, values in arms.items()},
                "difference": bootstrap([b - a for a, b in zip(*arms.values(), strict=True)]),
                "difference_by_step": {step: round(value, 4) for step, value in zip(steps, ahead, strict=True)},
            }
        )
    return rows


def keep_grid(records: Sequence[Record]) -> list[dict[str, Any]]:
    """KV caches kept across updates against recomputed ones, both with partial rollouts, by task and over all."""
    anew = {
        (r["task"], r["seed"]): r
        for r in records
        if r["grid"] == "main" and r["algorithm"] == "grpo" and r["over_sampling"] > 1
    }
    kept = [r for r in records if r["grid"] == "keep" and (r["task"], r["seed"]) in anew]
    rows = []
    for task in (*TASKS, "all"):
        pairs = [(anew[r["task"], r["seed"]], r) for r in kept if task in (r["task"], "all")]
        rows.append(
            {
                "task": task,
                "recompute": spread([final_accuracy(a) for a, _ in pairs]),
                "keep": spread([final_accuracy(b) for _, b in pairs]),
                "difference": bootstrap([final_accuracy(b) - final_accuracy(a) for a, b in pairs]),
            }
        )
    return rows


def gcd_grpo(records: Sequence[Record]) -> list[Record]:
    """The runs of the staleness grid, with the runs of the main grid that belong to it; each once."""
    grids = ("main", "staleness")
    own = [r for r in records if (r["task"], r["algorithm"]) == ("gcd", "grpo") and r["grid"] in grids]
    known = {
        (r["over_sampling"], r["max_staleness"], r["over_sampling"] > 1 and r["correction"], r["seed"]): r for r in own
    }
    return list(known.values())


def staleness_grid(records: Sequence[Record]) -> dict[str, Any]:
    """Each combination against the synchronous runs with the same seeds, and each correction over all of them
    that have no bound, so that no run that a bound did not touch counts twice."""
    cells = defaultdict(list)
    synchronous = {}
    for r in gcd_grpo(records):
        if r["over_sampling"] > 1:
            cells[r["over_sampling"], r["max_staleness"], r["correction"]].append(r)
        else:
            synchronous[r["seed"]] = final_accuracy(r)
    rows = []
    order = sorted(cells, key=lambda k: (k[0], k[1] is None, k[1] or 0, CORRECTIONS.index(k[2])))
    for over_sampling, bound, correction in order:
        runs = [r for r in cells[over_sampling, bound, correction] if r["seed"] in synchronous]
        difference = bootstrap([final_accuracy(r) - synchronous[r["seed"]] for r in runs])
        rows.append(
            {
                "over_sampling": over_sampling,
                "max_staleness": bound,
                "correction": correction,
                "accuracy": spread([final_accuracy(r) for r in runs]),
                "difference": difference,
                "breaks": None
                if difference["high"] is None
                else difference["mean"] < -BREAKS and difference["high"] < 0,
                "broke_off": sum("error" in r for r in runs),
                "mean_staleness": mean([r.get("mean_staleness") for r in runs]),
                "off_policy_tokens": mean([r.get("off_policy_token_share") for r in runs]),
                "kl_behaviour": mean([r["diagnostics"]["kl_behaviour"] for r in runs]),
                "clip_fraction": mean([r["diagnostics"]["clip_fraction"] for r in runs]),
                "masked_fraction": mean([r["diagnostics"]["masked_fraction"] for r in runs]),
                "largest_weight": max((r["largest_weight"] for r in runs), default=None),
            }
        )
    known = {r["correction"] for r in rows}
    by_correction = {
        correction: {
            name: bootstrap(
                [
                    final_accuracy(r) - synchronous[r["seed"]]
                    for (over_sampling, bound, own), runs in cells.items()
                    if bound is None and own == correction and name in ("all", f"{over_sampling:g}")
                    for r in runs
                    if r["seed"] in synchronous
                ]
            )
            for name in (
                "all",
                *(f"{over_sampling:g}" for over_sampling in sorted({k[0] for k in cells if k[1] is None})),
            )
        }
        for correction in CORRECTIONS
        if correction in known
    }
    return {
        "synchronous": spread(list(synchronous.values())),
        "rows": rows,
        "by_correction": by_correction,
        "bounds": what_bounds_add(cells),
    }


def what_bounds_add(cells: Mapping[tuple[float, int | None, str], Sequence[Record]]) -> dict[str, Any]:
    """By correction and bound: accuracy minus that without a bound, at the same N'/N with the same seed."""
    free = {
        (over_sampling, correction, r["seed"]): final_accuracy(r)
        for (over_sampling, bound, correction), runs in cells.items()
        if bound is None
        for r in runs
    }
    gains = defaultdict(list)
    for (over_sampling, bound, correction), runs in cells.items():
        for r in runs:
            other = free.get((over_sampling, correction, r["seed"]))
            if bound is not None and other is not None:
                gains[correction, bound].append(final_accuracy(r) - other)
    bounds = sorted({bound for _, bound in gains})
    return {
        correction: {
            str(bound): bootstrap(
                [g for (c, b), of in gains.items() if b == bound and correction in (c, "all") for g in of]
            )
            for bound in bounds
        }
        for correction in ("all", *CORRECTIONS)
    }


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 4) if known else None


def analyse(records: Sequence[Record]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "cells": len(records),
        "cpu_seconds": round(sum(r["cpu_seconds"] for r in records)),
        "main": main_grid(records),
        "staleness": staleness_grid(records),
        "long": long_grid(records),
        "keep": keep_grid(records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--study", type=Path, default=HERE / "study.jsonl")
    arguments = parser.parse_args()
    records = recorded(arguments.study)
    from plots import draw
    from tables import tables

    found = analyse(records)
    (arguments.study.parent / "analysis.json").write_text(json.dumps(found, indent=2) + "\n")
    (arguments.study.parent / "results.md").write_text(tables(found))
    draw(records, arguments.study.parent)
    print(f"{found['cells']} cells: analysis.json, results.md, learning.svg, staleness.svg")


if __name__ == "__main__":
    main()
