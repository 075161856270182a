"""Synchronous runs and the default in the study of the defaults, each at its best learning rate.

Invariants: an arm's best rate in a cell (a task with an algorithm) is the one with its highest mean final reward, among
the rates that both arms have run on at least four seeds; the target is that of synchronous runs at their best rate;
ratios are paired by seed, and pooled over cells as in `defaults_analysis`. The protocol is in docs/reports/defaults.md.

    python benchmarks/accuracy/defaults_rates.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from analysis import machine
from defaults_analysis import (
    DEFAULT,
    LEAST_SEEDS,
    RATIOS,
    STUDY,
    Measure,
    Pairs,
    Record,
    Runs,
    by_arm,
    compare,
    correction,
    default_correction,
    final,
    interval,
    paired,
    pooled,
    pooled_ratio,
    reward_difference,
    to_target,
    way_of,
)
from study import recorded

SYNCHRONOUS = "synchronous"
ARMS = (SYNCHRONOUS, DEFAULT)
Rates = Mapping[float, Mapping[str, Runs]]
"""Runs of one cell by the learning rate's scale and by arm."""


def rates_of(records: list[Record]) -> dict[tuple[str, str], dict[float, dict[str, Runs]]]:
    """Return the cells that have run with several learning rates, with the default's correction."""
    found: dict[tuple[str, str], dict[float, dict[str, Runs]]] = {}
    used = [record for record in records if correction(record) == default_correction(record["algorithm"])]
    for task, algorithm, scale in dict.fromkeys((r["task"], r["algorithm"], r["scale"]) for r in used):
        arms = by_arm([r for r in used if (r["task"], r["algorithm"], r["scale"]) == (task, algorithm, scale)])
        if all(len(arms.get(arm, ())) >= LEAST_SEEDS for arm in ARMS):
            found.setdefault((task, algorithm), {})[scale] = arms
    return {cell: dict(sorted(rates.items())) for cell, rates in found.items() if len(rates) > 1}


def best_rate(rates: Rates, arm: str) -> float:
    return max(rates, key=lambda scale: mean_final(rates[scale][arm]))


def mean_final(runs: Runs) -> float:
    return float(np.mean([final(run) for run in runs.values()]))


def at_best_rates(rates: Rates) -> tuple[Runs, Runs, float]:
    """Return the default's and the synchronous runs, each at the arm's best rate, and the target."""
    synchronous = rates[best_rate(rates, SYNCHRONOUS)][SYNCHRONOUS]
    start, end = way_of(synchronous)
    return rates[best_rate(rates, DEFAULT)][DEFAULT], synchronous, start + 0.9 * (end - start)


def on_shared_seeds(rates: Rates) -> Rates:
    """Return the runs of the seeds that both arms have run at all rates."""
    seeds = set.intersection(*(set(runs) for arms in rates.values() for arm, runs in arms.items() if arm in ARMS))
    return {
        scale: {arm: {seed: arms[arm][seed] for seed in sorted(seeds)} for arm in ARMS} for scale, arms in rates.items()
    }


def compared(rates: Rates) -> dict[str, Any]:
    ours, synchronous, target = at_best_rates(rates)
    return {
        "target": round(target, 4),
        "best_rate": {arm: best_rate(rates, arm) for arm in ARMS},
        "at_best_rates": compare(ours, synchronous, target),
    }


def described(rates: Rates) -> dict[str, Any]:
    _, synchronous, target = at_best_rates(rates)
    return {
        **compared(rates),
        "on_shared_seeds": compared(on_shared_seeds(rates)),
        "rates": {
            f"{scale:g}": {
                arm: {
                    "runs": len(arms[arm]),
                    "final_reward": round(mean_final(arms[arm]), 4),
                    "reached": sum(to_target(run, target, "accelerator")[1] for run in arms[arm].values()),
                    "to_synchronous_at_best_rate": compare(arms[arm], synchronous, target),
                }
                for arm in ARMS
            }
            for scale, arms in rates.items()
        },
    }


def pooled_at_best_rates(cells: Mapping[tuple[str, str], Rates]) -> dict[str, Any]:
    found = {cell: at_best_rates(rates) for cell, rates in cells.items()}

    def pairs(measure: Measure) -> Pairs:
        return {cell: paired(ours, others, target, measure) for cell, (ours, others, target) in found.items()}

    return {
        **{name: pooled_ratio(pairs(measure)) for name, measure in RATIOS.items()},
        "final_reward": pooled(pairs(reward_difference)),
    }


def main() -> None:
    cells = rates_of(recorded(STUDY))
    found = {
        "machine": machine(),
        "cells": {", ".join(cell): described(rates) for cell, rates in cells.items()},
        "pooled": pooled_at_best_rates(cells),
    }
    STUDY.with_name("defaults_rates.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, of in found["cells"].items():
        print(f"{name}: target {of['target']}, best rate {of['best_rate']}")
        for scale, arms in of["rates"].items():
            shown = {
                arm: f"{row['final_reward']:.3f}, {row['reached']} of {row['runs']}, "
                f"× {interval(row['to_synchronous_at_best_rate']['accelerator_to_target'], '.2f')}"
                for arm, row in arms.items()
            }
            print(f"  × {scale}: {shown}")
        for measure, of_measure in of["at_best_rates"].items():
            print(f"  {measure}: {interval(of_measure, '.3f')}")
    for measure, of_measure in found["pooled"].items():
        print(f"pooled {measure}: {interval(of_measure, '.3f')}")


if __name__ == "__main__":
    main()
