"""Results of the study of the defaults: a file of runs in, `<file>_analysis.json` and a table out.

Invariants: measures, pooling and decision follow the protocol in `docs/reports/defaults.md`; arms are compared seed by
seed, over all seeds that both arms have run. The study's own file is joined by the runs with GSPO's present correction.

    python benchmarks/accuracy/defaults_analysis.py
    python benchmarks/accuracy/defaults_analysis.py benchmarks/accuracy/defaults_gspo.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from analysis import as_ratio, bootstrap, machine
from defaults import ARMS, EARLIER_CORRECTION, HERE, TASKS
from study import recorded

DEFAULT, TOLERANCE = "automatic", 0.01
COMPARED, LEAST_SEEDS, LEAST_TASKS = ("synchronous", "automatic", "twice"), 4, 3
"""Arms that a pooled cell has run, their least number of common seeds, and the least number of tasks of a default."""
EVERY_ALGORITHM = {"gcd, dapo", "gcd, gspo"}
"""Cells that an arm must have run in, beside those with GRPO, to become the default."""
NOT_POOLED = ("quickstart", "gcd_one_update")
"""Tasks with the policy and problems of gcd."""
CHECKS = ("gcd, grpo, rate × 2", "gcd_one_update, grpo, rate × 1")
"""Cells of the checks before a change of the default."""
STUDY, GSPO = HERE / "defaults.jsonl", HERE / "defaults_gspo.jsonl"
SHARES = (0.5, 0.7, 0.8, 0.9, 1.0)
"""Other targets, as shares of the way from the start to the end of synchronous runs; not in the protocol."""
STEP, SAMPLES, REWARD = 0, 1, 2
"""Columns of a record's evaluations."""
Pairs = dict[tuple[str, str], list[float]]
"""Values paired by seed, by task and algorithm."""
CLOCKS = {
    "accelerator": ("rollout", "training"),
    "rollouts": ("rollout",),
    "cpu": ("cpu_rollout", "cpu_training"),
}
"""Seconds, as sums of parts of `accelerator.StepWork`."""

Record = Mapping[str, Any]
Runs = Mapping[int, Record]
"""By seed."""
Measure = Callable[[Record, Record, float], float]
"""Compares two runs of a seed, given the cell's target."""


def monotonic(values: Sequence[float]) -> list[float]:
    """Return the never decreasing values with the least squared distance (pool adjacent violators).

    >>> monotonic([0.5, 0.8, 0.7, 0.9])
    [0.5, 0.75, 0.75, 0.9]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (last, n), (before, m) = blocks.pop(), blocks.pop()
            blocks.append(((last * n + before * m) / (n + m), n + m))
    return [round(mean, 12) for mean, count in blocks for _ in range(count)]


def seconds(record: Record, clock: str) -> list[float]:
    """Return the seconds until the end of each step; the first entry is the start of the run."""
    parts = zip(*(record[name] for name in CLOCKS[clock]), strict=True)
    return [0.0, *accumulate(map(sum, parts))]


def at_target(record: Record, target: float, cost: Callable[[Sequence[Any]], float]) -> tuple[float, bool]:
    """Return the cost until the target, and whether the run reached it; else the cost of the whole run.

    A run that is at the target before training has the cost until its first evaluation after training.
    """
    found = record["evaluations"]
    rewards, costs = monotonic([each[REWARD] for each in found]), [cost(each) for each in found]
    for i, reward in enumerate(rewards):
        if reward >= target:
            if i == 0:
                return costs[1], True
            share = (target - rewards[i - 1]) / (reward - rewards[i - 1])
            return costs[i - 1] + share * (costs[i] - costs[i - 1]), True
    return costs[-1], False


def final(record: Record) -> float:
    return float(np.mean([found[REWARD] for found in record["evaluations"][-2:]]))


def way_of(synchronous: Runs) -> tuple[float, float]:
    """Return the mean reward at the start and at the end of synchronous runs."""
    start = np.mean([run["evaluations"][0][REWARD] for run in synchronous.values()])
    return float(start), float(np.mean([final(run) for run in synchronous.values()]))


def target_of(task: str, synchronous: Runs) -> float:
    start, end = way_of(synchronous)
    given = TASKS[task].target
    return start + 0.9 * (end - start) if given is None else given


def to_target(record: Record, target: float, clock: str) -> tuple[float, bool]:
    times = seconds(record, clock)
    return at_target(record, target, lambda found: times[found[STEP]])


def log_ratio(cost: Callable[[Record, float], float]) -> Measure:
    return lambda ours, others, target: float(np.log(cost(ours, target) / cost(others, target)))


def charged(clock: str) -> Measure:
    """Return the log ratio of costs until the target, with misses charged against the first run.

    If only the first run misses the target, it counts with the longer of both whole runs; if both miss, they are equal.
    """

    def measure(ours: Record, others: Record, target: float) -> float:
        (own, hit), (their, other_hit) = to_target(ours, target, clock), to_target(others, target, clock)
        if not hit and not other_hit:
            return 0.0
        return float(np.log((own if hit else max(own, seconds(others, clock)[-1])) / their))

    return measure


def until_target(clock: str) -> Measure:
    return log_ratio(lambda run, target: to_target(run, target, clock)[0])


def whole_run(clock: str) -> Measure:
    return log_ratio(lambda run, _: seconds(run, clock)[-1])


RATIOS: dict[str, Measure] = {
    **{f"{clock}_to_target": until_target(clock) for clock in CLOCKS},
    **{f"{clock}_to_target_misses_charged": charged(clock) for clock in ("accelerator", "cpu")},
    "samples_to_target": log_ratio(lambda run, target: at_target(run, target, lambda found: found[SAMPLES])[0]),
    **{f"{clock}_whole_run": whole_run(clock) for clock in ("accelerator", "cpu")},
}


def reward_difference(ours: Record, others: Record, _: float = 0.0) -> float:
    return final(ours) - final(others)


def paired(ours: Runs, others: Runs, target: float, measure: Measure) -> list[float]:
    return [measure(ours[seed], others[seed], target) for seed in sorted(ours.keys() & others.keys())]


def compare(ours: Runs, others: Runs, target: float) -> dict[str, Any]:
    return {
        **{name: as_ratio(bootstrap(paired(ours, others, target, measure))) for name, measure in RATIOS.items()},
        "final_reward": bootstrap(paired(ours, others, target, reward_difference)),
    }


def cell(task: str, arms: Mapping[str, Runs]) -> dict[str, Any]:
    synchronous = arms["synchronous"]
    start, end = way_of(synchronous)
    target = target_of(task, synchronous)
    found: dict[str, Any] = {"target": round(target, 4), "arms": {}}
    for arm, runs in arms.items():
        reached = [to_target(run, target, "accelerator") for run in runs.values()]
        cpu = [to_target(run, target, "cpu")[0] for run in runs.values()]
        found["arms"][arm] = {
            "runs": len(runs),
            "reached": sum(hit for _, hit in reached),
            "accelerator_seconds_to_target": round(float(np.median([time for time, _ in reached])), 1),
            "cpu_seconds_to_target": round(float(np.median(cpu)), 1),
            "final_reward": round(float(np.mean([final(run) for run in runs.values()])), 4),
            "curve": [
                round(float(x), 4)
                for x in np.mean([[e[REWARD] for e in run["evaluations"]] for run in runs.values()], 0)
            ],
            "staleness_mean": round(float(np.mean([run["staleness_mean"] for run in runs.values()])), 3),
            "staleness_max": max(run["staleness_max"] for run in runs.values()),
            "targets": {seed: run["by_step"]["over_sampling_batch_size"] for seed, run in runs.items()},
            "minus_synchronous": compare(runs, synchronous, target),
            "relative_to_default": compare(runs, arms[DEFAULT], target) if DEFAULT in arms else None,
        }
    found["by_target"] = {
        f"{share:g}": {
            arm: compare(runs, synchronous, start + share * (end - start))["accelerator_to_target"]
            for arm, runs in arms.items()
        }
        for share in SHARES
    }
    return found


def eligible(difference: Mapping[str, Any]) -> bool:
    """Whether an arm with this difference of final rewards to synchronous runs may become the default."""
    within = difference["low"] is not None and difference["low"] <= 0 <= difference["high"]
    return bool(difference["mean"] >= -TOLERANCE or within)


def pooled(pairs: Pairs, resamples: int = 10_000) -> dict[str, Any]:
    """Return the mean over cells of their means, with intervals: cells and seeds drawn, and only seeds drawn."""
    rng = np.random.default_rng(0)
    cells = [np.asarray(values) for values in pairs.values()]
    # The means of resampled seeds, [cells, resamples].
    seeds = np.stack(
        [values[rng.integers(len(values), size=(resamples, len(values)))].mean(axis=1) for values in cells]
    )
    fixed = np.percentile(seeds.mean(axis=0), [2.5, 97.5])
    drawn = np.zeros(resamples)
    for chosen in rng.integers(len(cells), size=(len(cells), resamples)):
        # A cell that is drawn twice has its seeds drawn twice.
        for index, values in enumerate(cells):
            at = np.nonzero(chosen == index)[0]
            drawn[at] += values[rng.integers(len(values), size=(len(at), len(values)))].mean(axis=1)
    low, high = np.percentile(drawn / len(cells), [2.5, 97.5])
    return {
        "mean": round(float(np.mean([values.mean() for values in cells])), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "pairs": sum(map(len, cells)),
        "cells": len(cells),
        "fixed_low": round(float(fixed[0]), 4),
        "fixed_high": round(float(fixed[1]), 4),
    }


def pooled_ratio(pairs: Pairs) -> dict[str, Any]:
    found = pooled(pairs)
    ends = ("mean", "low", "high", "fixed_low", "fixed_high")
    return {**found, **{end: round(float(np.exp(found[end])), 4) for end in ends}}


def pool(cells: Mapping[tuple[str, str], Mapping[str, Runs]]) -> dict[str, Any]:
    """Pool the cells that `COMPARED` have run on enough common seeds, and apply the protocol's rule."""
    members = {
        cell: arms
        for cell, arms in cells.items()
        if cell[0] not in NOT_POOLED
        and len(set.intersection(*(set(arms.get(arm, {})) for arm in COMPARED))) >= LEAST_SEEDS
    }
    if not members:
        return {}
    targets = {cell: target_of(cell[0], arms["synchronous"]) for cell, arms in members.items()}

    def pairs(arm: str, other: str, measure: Measure) -> Pairs:
        found = {cell: paired(of.get(arm, {}), of[other], targets[cell], measure) for cell, of in members.items()}
        return {cell: values for cell, values in found.items() if values}

    def against(arm: str, other: str) -> dict[str, Any]:
        return {
            **{name: pooled_ratio(pairs(arm, other, measure)) for name, measure in RATIOS.items()},
            "final_reward": pooled(pairs(arm, other, reward_difference)),
        }

    found: dict[str, Any] = {"cells": [", ".join(cell) for cell in members], "arms": {}}
    for arm in ARMS:
        rewards = pairs(arm, "synchronous", reward_difference)
        if not rewards:
            continue
        by_task: dict[str, float] = {}
        soonness = pairs(arm, DEFAULT, RATIOS["accelerator_to_target"])
        for task in dict.fromkeys(task for task, _ in soonness):
            means = [np.mean(values) for cell, values in soonness.items() if cell[0] == task]
            by_task[task] = round(float(np.exp(np.mean(means))), 4)
        runs = [run for of in members.values() for run in of.get(arm, {}).values()]
        found["arms"][arm] = {
            "minus_synchronous": against(arm, "synchronous"),
            "relative_to_default": {**against(arm, DEFAULT), "by_task": by_task},
            "relative_to_twice": against(arm, "twice"),
            "eligible_by_cell": {", ".join(cell): eligible(bootstrap(values)) for cell, values in rewards.items()},
            "staleness_mean": round(float(np.mean([run["staleness_mean"] for run in runs])), 3),
        }
    found["rule_before_checks"] = pooled_rule(found["arms"])
    return found


def pooled_rule(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the protocol's rule to the pooled cells."""

    def allowed(arm: str) -> bool:
        of = arms[arm]
        enough = len(of["relative_to_default"]["by_task"]) >= LEAST_TASKS
        if arm not in ("synchronous", DEFAULT):
            enough = enough and of["eligible_by_cell"].keys() >= EVERY_ALGORITHM
        return enough and all(of["eligible_by_cell"].values()) and eligible(of["minus_synchronous"]["final_reward"])

    def ratio(arm: str) -> float:
        return float(arms[arm]["minus_synchronous"]["accelerator_to_target"]["mean"])

    candidates = [arm for arm in arms if allowed(arm)]
    soonest = min(candidates, key=ratio, default=DEFAULT)
    against = arms[soonest]["relative_to_default"]
    sooner = sum(task < 1.0 for task in against["by_task"].values())
    changes = soonest != DEFAULT and against["accelerator_to_target"]["high"] < 1.0 and sooner >= LEAST_TASKS
    return {
        "eligible": candidates,
        "soonest": soonest,
        "names": soonest if changes else DEFAULT,
        "default_ahead_of_synchronous": arms[DEFAULT]["minus_synchronous"]["accelerator_to_target"]["high"] < 1.0,
    }


def decision(named: str, cells: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the checks to the arm that the rule names: it becomes the default if no check rejects it."""
    checks: dict[str, Any] = {}
    for name in CHECKS:
        if named != DEFAULT and (of := cells.get(name, {}).get("arms", {}).get(named)):
            time, reward = (of["relative_to_default"][each] for each in ("accelerator_to_target", "final_reward"))
            passed = bool(time["mean"] <= 1.0 and reward["mean"] >= -TOLERANCE)
            checks[name] = {"accelerator_to_target": time, "final_reward": reward, "passed": passed}
    rejected = not all(check["passed"] for check in checks.values())
    return {"named_by_the_rule": named, "checks": checks, "default": DEFAULT if rejected else named}


def correction(record: Record) -> str:
    return str(record.get("correction", EARLIER_CORRECTION))


def default_correction(algorithm: str) -> str:
    return "geometric" if algorithm == "gspo" else EARLIER_CORRECTION


def with_present_default(records: Sequence[Record]) -> list[Record]:
    """Return the synchronous runs with GSPO, and those of automatic N' with its present correction, as `automatic`.

    A correction changes nothing in synchronous runs, so they count for the present correction too.
    """
    arms = {"synchronous": "synchronous", "automatic-geometric": "automatic"}
    return [{**r, "arm": arms[r["arm"]], "correction": "geometric"} for r in records if r["arm"] in arms]


def by_arm(records: Sequence[Record]) -> dict[str, Runs]:
    """Return the runs of one cell by arm."""
    arms: dict[str, Runs] = {
        arm: {r["seed"]: r for r in records if r["arm"] == arm and "error" not in r} for arm in ARMS
    }
    # A synchronous run without the default's run of its seed would move the target of the other seeds.
    paired = arms["synchronous"].keys() & arms[DEFAULT].keys()
    arms["synchronous"] = {seed: arms["synchronous"][seed] for seed in sorted(paired)}
    return {arm: runs for arm, runs in arms.items() if runs}


def analyse(records: Sequence[Record]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    present: dict[tuple[str, str], dict[str, Runs]] = {}
    for key in dict.fromkeys((r["task"], r["algorithm"], r["scale"], correction(r)) for r in records):
        task, algorithm, scale, corrected = key
        arms = by_arm([r for r in records if (r["task"], r["algorithm"], r["scale"], correction(r)) == key])
        if "synchronous" not in arms or DEFAULT not in arms:
            continue
        suffix = "" if corrected == EARLIER_CORRECTION else f", {corrected}"
        cells[f"{task}, {algorithm}, rate × {scale:g}{suffix}"] = cell(task, arms)
        if scale == 1.0 and corrected == default_correction(algorithm):
            present[task, algorithm] = arms
    found = pool(present)
    return {
        "machine": machine(),
        "runs": len(records),
        "failed": [r["key"] for r in records if "error" in r],
        "idle_seconds": max((r["idle_seconds"] for r in records), default=0.0),
        "cpu_seconds": round(sum(r["cpu_seconds"] for r in records)),
        "cells": cells,
        "pooled": found,
        "decision": decision(found["rule_before_checks"]["names"], cells) if found else None,
    }


def interval(found: Mapping[str, Any], form: str) -> str:
    return f"{found['mean']:{form}} [{found['low'] or 0:{form}}, {found['high'] or 0:{form}}] ({found['pairs']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", default=STUDY, help="the runs' file")
    runs = parser.parse_args().runs
    analysis = analyse(recorded(runs) + with_present_default(recorded(GSPO)) * (runs == STUDY))
    runs.with_name(f"{runs.stem}_analysis.json").write_text(json.dumps(analysis, indent=1) + "\n")
    for name, of in analysis["cells"].items():
        for share, by_arm in of["by_target"].items():
            shown = {arm: interval(each, ".2f") for arm, each in by_arm.items()}
            print(f"  at {share} of the way: {shown}")
        print(f"{name}: target {of['target']}")
        for arm, row in of["arms"].items():
            against = row["minus_synchronous"]
            print(
                f"  {arm:16s} {row['reached']}/{row['runs']} {row['accelerator_seconds_to_target']:7.1f} s, "
                f"× {interval(against['accelerator_to_target'], '.2f')}, "
                f"misses charged × {interval(against['accelerator_to_target_misses_charged'], '.2f')}, "
                f"CPU × {interval(against['cpu_to_target'], '.2f')}, "
                f"samples × {interval(against['samples_to_target'], '.2f')}, "
                f"reward {interval(against['final_reward'], '+.3f')}, staleness {row['staleness_mean']}"
            )
    print_pool(analysis["pooled"])
    print(analysis["decision"])


def print_pool(pool: Mapping[str, Any]) -> None:
    if not pool:
        return
    print(f"pooled over {pool['cells']}: {pool['rule_before_checks']}")
    for arm, row in pool["arms"].items():
        for against in ("minus_synchronous", "relative_to_default"):
            of = row[against]
            time = of["accelerator_to_target"]
            print(
                f"  {arm:16s} {against:20s} × {interval(time, '.3f')}, cells fixed [{time['fixed_low']:.3f}, "
                f"{time['fixed_high']:.3f}], misses charged × "
                f"{interval(of['accelerator_to_target_misses_charged'], '.3f')}, CPU × "
                f"{interval(of['cpu_to_target'], '.2f')}, "
                f"reward {interval(of['final_reward'], '+.4f')} {of.get('by_task', '')}"
            )


if __name__ == "__main__":
    main()
