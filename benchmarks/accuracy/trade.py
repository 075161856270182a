"""The seventh study: the cost in accuracy and the gain in time of each N', with stale and with redrafted tokens.
`protocol.md` lists the runs and their reasons; each run adds a JSON line to `trade.jsonl` when it ends;
`trade_analysis.json` contains the results, and `trade.svg` the curve.

Invariants: as in `study.py`; and the arms of a seed run one after another.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/trade.py --runs 3
    python benchmarks/accuracy/trade.py --runs 0          # only the analysis
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from analysis import SECONDS, STEP, as_ratio, bootstrap, final_accuracy, machine, to_target
from comparison import differences, runs_of, sign_flip
from plots import trade as curve_of_the_trade
from remedies import TASK_RATE, Run, observe_moments
from remedies_analysis import curve, log_ratios, ratios_to, spent, target_of
from study import HERE, recorded, run_cells

from april.engines.embedded.engine import EmbeddedEngine
from april.rollout.batch import RolloutBatch
from april.rollout.scheduler import RolloutScheduler
from april.simulation.hardware import GPUS, MODELS, roofline
from april.training.local import LocalLearner

RATIOS = (1.5, 2, 3)
N, SAMPLES_PER_PROMPT = 8, 8


def _partial(ratio: float, on_update: str) -> dict[str, Any]:
    groups = round(ratio * N)
    return {
        "rollout.over_sampling_batch_size": groups,
        "engine.on_update": on_update,
        "engine.max_num_seqs": max(128, groups * SAMPLES_PER_PROMPT),
    }


ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"rollout.partial_rollout": False, "rollout.over_sampling_batch_size": N},
    **{f"partial-{ratio:g}": _partial(ratio, "recompute") for ratio in RATIOS},
    **{f"redraft-{ratio:g}": _partial(ratio, "redraft") for ratio in RATIOS},
    "partial-2-longer": {**_partial(2, "recompute"), "training.steps": 15},
}
ALGORITHMS = ("grpo", "dapo", "gspo")
RATE = 1.7e-4
"""The best rate of synchronous runs on `factors` in the second study."""
SEEDS = range(900, 908)
WORK = ("passes", "prefilled_tokens")
"""What the engine did in a step's rollouts, evaluations left out."""
BATCH = 64
"""Samples that decode in the pass whose seconds stand for every pass."""


@dataclass(frozen=True)
class TradeRun(Run):
    """One run of the seventh study."""

    arms = ARMS

    def more(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found = super().more(steps)
        found["by_step"] |= {name: [int(step[name]) for step in steps] for name in WORK}
        return found


def planned() -> Iterator[TradeRun]:
    """The protocol's runs in its order."""
    for algorithm in ALGORITHMS:
        for seed in SEEDS:
            for task, scale in TASK_RATE.items():
                rate = float(f"{scale * RATE:.2g}")
                yield from (TradeRun("trade", task, algorithm, arm, rate, seed) for arm in ARMS)


def observe_work() -> None:
    """Have every training step record the engine's work for its rollouts."""
    done, before, of_step = dict.fromkeys(WORK, 0), dict.fromkeys(WORK, 0), dict.fromkeys(WORK, 0)
    chunks, collect, train = EmbeddedEngine._chunks, RolloutScheduler.next_batch, LocalLearner.train

    def counted(self: EmbeddedEngine) -> Any:
        found = chunks(self)
        done["passes"] += 1
        done["prefilled_tokens"] += sum(size for _, size in found)
        return found

    async def collected(self: RolloutScheduler, last: bool = False) -> RolloutBatch:
        before.update(done)
        step = await collect(self, last)
        of_step.update({name: done[name] - before[name] for name in WORK})
        return step

    def trained(self: LocalLearner, step: RolloutBatch, number: int) -> dict[str, float]:
        return train(self, step, number) | of_step

    EmbeddedEngine._chunks = counted  # type: ignore[method-assign]
    RolloutScheduler.next_batch = collected  # type: ignore[method-assign]
    LocalLearner.train = trained  # type: ignore[method-assign]


@cache
def accelerator() -> tuple[float, float]:
    """Seconds of a decode pass and of a prefilled token: Qwen3-8B on an H100, by the data sheet."""
    costs = roofline(GPUS["h100"], MODELS["qwen3-8b"])
    return float(np.interp(BATCH, costs.decode_batches, costs.decode_seconds)), costs.prefill_token_seconds


def on_accelerator(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same run, with the seconds of its rollouts on the accelerator."""
    of_pass, of_token = accelerator()
    steps = [of_pass * p + of_token * t for p, t in zip(*(record["by_step"][name] for name in WORK), strict=True)]
    evaluations = [list(found) for found in record["evaluations"]]
    for found in evaluations:
        found[SECONDS] = sum(steps[: found[STEP]])
    return {**record, "evaluations": evaluations, "accelerator_seconds": sum(steps)}


class Pool:
    """Combined results of the pairs of several cells, arm by arm."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, list[float]]] = {arm: {} for arm in ARMS}
        self.staleness: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def add(self, arm: str, found: Mapping[str, list[float]], own: Mapping[int, Mapping[str, Any]]) -> None:
        for name, values in found.items():
            self.of[arm].setdefault(name, []).extend(values)
        self.staleness[arm] += [run["mean_staleness"] for run in own.values()]

    def said(self) -> dict[str, Any]:
        return {arm: said(found, self.staleness[arm]) for arm, found in self.of.items() if found}


def found_in(own: Mapping[int, Any], synchronous: Mapping[int, Any], target: float | None) -> dict[str, list[float]]:
    """Of an arm against synchronous runs, seed by seed: differences in accuracy, logarithms of ratios of the rest."""
    costs = ratios_to(target, own, synchronous)
    theirs, ours = ({seed: on_accelerator(run) for seed, run in runs.items()} for runs in (synchronous, own))

    def reaching(record: Mapping[str, Any]) -> float | None:
        return None if target is None else to_target(record, target, SECONDS)

    return {
        "difference": differences(own, synchronous),
        "samples": costs["samples_to_target"],
        "cpu": costs["cpu_seconds_to_target"],
        "accelerator": log_ratios(ours, theirs, reaching),
        "whole_cpu": log_ratios(own, synchronous, spent),
        "whole_accelerator": log_ratios(ours, theirs, lambda record: record["accelerator_seconds"]),
    }


def said(found: Mapping[str, list[float]], staleness: Sequence[float]) -> dict[str, Any]:
    return {
        "pairs": len(found["difference"]),
        "staleness": round(float(np.mean(staleness)), 3),
        "minus_synchronous": bootstrap(found["difference"]),
        "samples_to_target": as_ratio(bootstrap(found["samples"])),
        "cpu_seconds_to_target": as_ratio(bootstrap(found["cpu"])),
        "accelerator_seconds_to_target": as_ratio(bootstrap(found["accelerator"])),
        "cpu_seconds": as_ratio(bootstrap(found["whole_cpu"])),
        "accelerator_seconds": as_ratio(bootstrap(found["whole_accelerator"])),
    }


def analyse(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each arm against synchronous runs of its seed: by task and algorithm, by algorithm, and over all."""
    cells, over_all, by_algorithm = [], Pool(), {algorithm: Pool() for algorithm in ALGORITHMS}
    for task, algorithm in dict.fromkeys((run.task, run.algorithm) for run in planned()):
        of = {arm: runs_of(records, SEEDS, arm=arm, task=task, algorithm=algorithm) for arm in ARMS}
        target = target_of(of["synchronous"])
        for arm, own in of.items():
            if not own:
                continue
            found = found_in(own, of["synchronous"], target)
            for pool in (over_all, by_algorithm[algorithm]):
                pool.add(arm, found, own)
            ends = [round(final_accuracy(own[seed]), 4) for seed in sorted(own)]
            cell = {"task": task, "algorithm": algorithm, "arm": arm, "target": target, "by_seed": ends}
            tested = {"p": sign_flip(found["difference"])} if arm in ("partial-2", "redraft-2") else {}
            staleness = [run["mean_staleness"] for run in own.values()]
            cells.append({**cell, "curve": curve(own), **tested, **said(found, staleness)})
    of_pass, of_token = accelerator()
    return {
        "machine": machine(),
        "runs": len(records),
        "cpu_seconds": round(sum(record["cpu_seconds"] for record in records)),
        "accelerator": {
            "source": "qwen3-8b on h100, roofline",
            "batch": BATCH,
            "decode_pass_seconds": of_pass,
            "prefill_token_seconds": of_token,
        },
        "over_all": over_all.said(),
        "by_algorithm": {name: pool.said() for name, pool in by_algorithm.items() if pool.of["synchronous"]},
        "cells": cells,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "trade.jsonl")
    parser.add_argument("--runs", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    observe_moments()
    observe_work()
    if arguments.runs != 0:
        run_cells(list(planned()), arguments.output, arguments.runs)
    analysis = analyse(recorded(arguments.output))
    (HERE / "trade_analysis.json").write_text(json.dumps(analysis, indent=1) + "\n")
    curve_of_the_trade(analysis["over_all"]).savefig(HERE / "trade.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
