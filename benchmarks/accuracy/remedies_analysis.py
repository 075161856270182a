"""Results of the second study: `remedies.jsonl` in, `remedies_analysis.json`, `remedies.md` and a figure out.

Invariants: as in `analysis.py`; and
- `protocol.md`, fixed before the first run, defines which runs count and how they are compared;
- runs that are missing are listed as missing, not omitted.

    python benchmarks/accuracy/remedies_analysis.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from analysis import ACCURACY, SAMPLES, SECONDS, as_ratio, bootstrap, final_accuracy, machine, to_target
from comparison import Runs, differences, holm, mean_accuracy, paired, runs_of, sign_flip
from remedies import BASELINES, CHEAPEST_FIRST, CONFIRMED, PAIRED, candidates, known_arms, own_rates, rates_of, tried
from study import HERE, recorded

from april.reporting.alarms import STEPS, drift

Record = Mapping[str, Any]

COSTS = {"samples_to_target": SAMPLES, "cpu_seconds_to_target": SECONDS}
"""What coming to a target costs, as columns of an evaluation."""

COLLAPSED = 0.1
"""A run has collapsed whose final accuracy is this far below the mean of the synchronous runs at their best rate."""
SIGNS = {"ess": -1, "kl_behaviour": 1, "grad_norm": 1}
"""What could warn of a rate that is too high, and whether it is then larger or smaller."""
SHOWN = ("reward", "response_length_mean", "grad_norm", "ess", "agreement", "kl_behaviour")
"""Of each step, in the figure and in the table of the first steps."""


def at(records: Sequence[Record], arm: str, rate: float | None) -> Runs:
    """An arm's paired runs at a rate."""
    return runs_of(records, PAIRED, arm=arm, rate=rate, task="factors", algorithm="grpo")


def rates_tried(records: Sequence[Record]) -> dict[str, Any]:
    found = {}
    for arm in BASELINES:
        rows = {f"{rate:g}": [round(v, 4) for v in values] for rate, values in tried(arm, records).items()}
        found[arm] = {"final_accuracy": rows, "best": candidates(arm, records)[1]}
    return found


def target_of(synchronous: Runs) -> float | None:
    """Nine tenths of the way from the warm start to where synchronous runs end at their best rate."""
    if not synchronous:
        return None
    starts = np.mean([r["evaluations"][0][ACCURACY] for r in synchronous.values()])
    ends = np.mean([final_accuracy(r) for r in synchronous.values()])
    return round(float(starts + 0.9 * (ends - starts)), 4)


def log_ratios(ours: Runs, others: Runs, measure: Callable[[Record], float | None]) -> list[float]:
    """Of what ours take by what the others take, seed by seed."""
    return [float(np.log(b / a)) for a, b in paired(ours, others, measure)]


def ratios_to(target: float | None, ours: Runs, others: Runs) -> dict[str, list[float]]:
    """Logarithms of the ratios of the cost to reach `target`, over the pairs in which both runs reached it."""
    return {
        cost: [] if target is None else log_ratios(ours, others, lambda r, c=column: to_target(r, target, c))
        for cost, column in COSTS.items()
    }


def against(ours: Runs, others: Runs, target: float | None) -> dict[str, Any]:
    """Ours compared with the others, seed by seed."""
    difference = differences(ours, others)
    return {
        "difference": bootstrap(difference),
        "p": sign_flip(difference),
        **{cost: as_ratio(bootstrap(values)) for cost, values in ratios_to(target, ours, others).items()},
        "cpu_seconds": as_ratio(bootstrap(log_ratios(ours, others, spent))),
    }


def spent(record: Record) -> float | None:
    """CPU seconds of rollouts and training."""
    return record.get("rollout_seconds", 0.0) + record.get("train_seconds", 0.0) or None


def at_rate(records: Sequence[Record], rates: Mapping[str, float], target: float | None) -> dict[str, Any]:
    """Every arm at one of the study's two rates.

    Args:
        rates: the rate of each baseline; remedies use the rate of `partial`.
    """
    arms = known_arms(records)
    runs = {arm: at(records, arm, rates.get(arm, rates["partial"])) for arm in arms}
    rows = {}
    for arm, own in runs.items():
        ends = [round(final_accuracy(own[seed]), 4) for seed in sorted(own)]
        rows[arm] = {
            "rate": rates.get(arm, rates["partial"]),
            "runs": len(own),
            "final_accuracy": round(float(np.mean(ends)), 4) if ends else None,
            "by_seed": ends,
            "curve": curve(own),
            "staleness": round(float(np.mean([r["mean_staleness"] for r in own.values()])), 3) if ends else None,
            "minus_synchronous": against(own, runs["synchronous"], target),
            "minus_partial": against(own, runs["partial"], target),
        }
    corrected = holm({arm: rows[arm]["minus_partial"]["p"] for arm in CHEAPEST_FIRST})
    for arm, p in corrected.items():
        rows[arm]["corrected_p"] = p
    return rows


def by_step(runs: Runs) -> dict[str, list[float]]:
    """The mean over runs of what each step logged."""
    return {
        name: [float(f"{v:.4g}") for v in np.mean([r["by_step"][name] for r in runs.values()], axis=0)]
        for name in SHOWN
        if runs
    }


def warnings(records: Sequence[Record], level: float) -> dict[str, Any]:
    """How well each signal, averaged over a run's first three steps and over all, identifies collapsed runs."""
    ended = [r for r in records if "error" not in r]
    collapsed = np.array([final_accuracy(r) < level - COLLAPSED for r in ended])
    found: dict[str, Any] = {"runs": len(ended), "collapsed": int(collapsed.sum()), "level": round(level, 4)}
    for arm in ("all", *BASELINES):
        chosen = np.array([arm in ("all", r["arm"]) for r in ended])
        for name, sign in SIGNS.items():
            for window, steps in (("first three steps", slice(0, 3)), ("all steps", slice(None))):
                values = np.array([np.mean(r["by_step"][name][steps]) for r in ended])
                bad, good = values[chosen & collapsed], values[chosen & ~collapsed]
                found[f"{arm}, {name}, {window}"] = {
                    "collapsed": ends_of(bad),
                    "held": ends_of(good),
                    "chance_of_order": order(sign * bad, sign * good),
                }
    return found


def ends_of(values: Any) -> dict[str, Any] | None:
    if not len(values):
        return None
    low, middle, high = (float(f"{v:.4g}") for v in np.percentile(values, [0, 50, 100]))
    return {"min": low, "median": middle, "max": high, "runs": len(values)}


def order(larger: Any, smaller: Any) -> float | None:
    """The chance that one of the first is larger than one of the second (area under the ROC curve)."""
    if not len(larger) or not len(smaller):
        return None
    return round(float((larger[:, None] > smaller[None, :]).mean()), 3)


def analyse(records: Sequence[Record]) -> dict[str, Any]:
    tries = rates_tried(records)
    rates = rates_of(records)
    found: dict[str, Any] = {
        "machine": machine(),
        "runs": len(records),
        "cpu_seconds": round(sum(r["cpu_seconds"] for r in records)),
        "rates": tries,
    }
    if rates is None:
        return found
    best = {"synchronous": rates.synchronous, "partial": rates.partial}
    high = rates.high
    target = target_of(at(records, "synchronous", best["synchronous"]))
    found |= {
        "target": target,
        "best": at_rate(records, best, target),
        "high": at_rate(records, dict.fromkeys(BASELINES, high), target),
        "by_step": {
            f"{arm}, {name}": by_step(at(records, arm, rate))
            for arm in known_arms(records)
            for name, rate in (("best", best.get(arm, best["partial"])), ("high", high))
        },
    }
    found |= {"slower": slower(records, high), "own_rate": own_rates(records), "confirm": confirmed(records)}
    found["warned"] = warned(records, high)
    level = found["best"]["synchronous"]["final_accuracy"]
    return found | {"warnings": warnings(records, level)} if level else found


def slower(records: Sequence[Record], high: float) -> list[dict[str, Any]]:
    """Synchronous runs at the rate that `ess` had on average, against `ess`: does a lower rate alone do it?"""
    rates = sorted({r["rate"] for r in records if r["stage"] == "two" and r["arm"] == "synchronous"})
    ess = at(records, "ess", high)
    found = [(rate, at(records, "synchronous", rate)) for rate in rates]
    return [
        {"rate": rate, "final_accuracy": round(mean_accuracy(own), 4), **against(ess, own, None)} for rate, own in found
    ]


def confirmed(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each arm of the confirmation against synchronous runs, by task and algorithm and over all; the target is 90 % of
    the way from the warm start to where the synchronous runs of that task and algorithm end. `curves` are the mean
    accuracies of the synchronous runs and of the arm at each evaluation."""
    own = [r for r in records if r["stage"] == "confirm"]
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in own if r["arm"] != "synchronous"):
        everything: list[float] = []
        ratios: dict[str, list[float]] = {cost: [] for cost in COSTS}
        for task, algorithm in dict.fromkeys((r["task"], r["algorithm"]) for r in own):
            where = {"task": task, "algorithm": algorithm}
            ours, others = (runs_of(own, CONFIRMED, arm=a, **where) for a in (arm, "synchronous"))
            target = target_of(others)
            everything += differences(ours, others)
            for cost, values in ratios_to(target, ours, others).items():
                ratios[cost] += values
            curves = [curve(others), curve(ours)]
            rows.append({"arm": arm, **where, "target": target, "curves": curves, **against(ours, others, target)})
        whole = {cost: as_ratio(bootstrap(values)) for cost, values in ratios.items()}
        rows.append({"arm": arm, "task": "all", "algorithm": "all", "difference": bootstrap(everything), **whole})
    return rows


def curve(runs: Runs) -> list[float]:
    """Mean accuracy at each evaluation."""
    ended = [[found[ACCURACY] for found in r["evaluations"]] for r in runs.values() if "error" not in r]
    return [round(float(value), 4) for value in np.mean(ended, axis=0)] if ended else []


def warned(records: Sequence[Record], high: float) -> dict[str, dict[str, int]]:
    """Number of runs with partial rollouts in which `april train` warns that the rate is too high for the staleness."""
    found: dict[str, dict[str, int]] = {where: {"runs": 0, "warned": 0} for where in ("at the high rate", "below it")}
    for record in records:
        if record["arm"] == "synchronous" or "error" in record:
            continue
        logged = record["by_step"]
        steps = [
            {"ess": ess, "kl_behaviour": kl, "grad_norm": norm}
            for ess, kl, norm in zip(logged["ess"], logged["kl_behaviour"], logged["grad_norm"], strict=True)
        ]
        said = [drift(steps[end - STEPS : end]) for end in range(STEPS, len(steps) + 1)]
        count = found["at the high rate" if record["rate"] > 0.9 * high else "below it"]
        count["runs"] += 1
        count["warned"] += any(said)
    return found


def interval(x: Mapping[str, Any], digits: str = "+.3f") -> str:
    if x["mean"] is None:
        return "–"
    ends = "" if x["low"] is None else f" [{x['low']:{digits}}, {x['high']:{digits}}]"
    return f"{x['mean']:{digits}}{ends}"


def rate_table(found: Mapping[str, Any]) -> list[str]:
    lines = ["| arm | rate | final accuracy | by seed |", "|---|---|---|---|"]
    for arm, tries in found["rates"].items():
        for rate, values in tries["final_accuracy"].items():
            chosen = " (best)" if tries["best"] == float(rate) else ""
            seeds = " ".join(f"{v:.3f}" for v in values)
            lines.append(f"| {arm} | {rate}{chosen} | {np.mean(values):.3f} | {seeds} |")
    return lines


def arm_table(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "| arm | rate | runs | final accuracy | staleness | minus synchronous | minus partial | p, Holm "
        "| samples to the target, of synchronous | CPU seconds to the target | CPU seconds of a run |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in rows.items():
        if not row["runs"]:
            lines.append(f"| {arm} | {row['rate']:g} | 0 | not run | | | | | | | |")
            continue
        own, partial = row["minus_synchronous"], row["minus_partial"]
        p = row.get("corrected_p")
        lines.append(
            f"| {arm} | {row['rate']:g} | {row['runs']} | {row['final_accuracy']:.3f} | {row['staleness']:.2f} | "
            f"{interval(own['difference']) if arm != 'synchronous' else ''} | "
            f"{interval(partial['difference']) if arm not in BASELINES else ''} | {'' if p is None else f'{p:.3f}'} | "
            f"{interval(own['samples_to_target'], '.2f') if arm != 'synchronous' else ''} | "
            f"{interval(own['cpu_seconds_to_target'], '.2f') if arm != 'synchronous' else ''} | "
            f"{interval(own['cpu_seconds'], '.2f') if arm != 'synchronous' else ''} |"
        )
    return lines


def own_rate_table(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    lines = ["| remedy | rate | final accuracy | runs |", "|---|---|---|---|"]
    return lines + [
        f"| {arm} | {rate} | {np.mean(values):.3f} | {len(values)} |"
        for arm, of in rows.items()
        for rate, values in of.items()
    ]


def confirm_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| arm | task | algorithm | pairs | minus synchronous | samples to the target, of synchronous "
        "| CPU seconds to the target | pairs that reach it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['arm']} | {r['task']} | {r['algorithm']} | {r['difference']['pairs']} | {interval(r['difference'])} | "
        f"{interval(r['samples_to_target'], '.2f')} | {interval(r['cpu_seconds_to_target'], '.2f')} | "
        f"{r['cpu_seconds_to_target']['pairs']} |"
        for r in rows
    ]


def step_table(found: Mapping[str, Any]) -> list[str]:
    lines = ["| runs | " + " | ".join(f"{name}, steps 1 2 3 … 12" for name in SHOWN) + " |"]
    lines.append("|---" * (len(SHOWN) + 1) + "|")
    for name, logged in found["by_step"].items():
        if logged:
            cells = (" ".join(f"{v:.3g}" for v in logged[one][:3]) + f" … {logged[one][-1]:.3g}" for one in SHOWN)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def warning_table(found: Mapping[str, Any]) -> list[str]:
    def ends(x: Mapping[str, Any] | None) -> str:
        return "none" if x is None else f"{x['min']:g} / {x['median']:g} / {x['max']:g} ({x['runs']})"

    lines = [
        "| runs, signal, over | collapsed: min / median / max (runs) | held | chance of the order |",
        "|---|---|---|---|",
    ]
    for name, row in found["warnings"].items():
        if isinstance(row, dict):
            lines.append(f"| {name} | {ends(row['collapsed'])} | {ends(row['held'])} | {row['chance_of_order']} |")
    return lines


def page(found: Mapping[str, Any]) -> str:
    lines = [
        "# Remedies: results",
        "",
        f"Made by `remedies_analysis.py` from the {found['runs']} runs in `remedies.jsonl` "
        f"({found['cpu_seconds']:,} CPU seconds), by [the protocol](protocol.md). Brackets: 95 % bootstrap interval",
        "of the mean over pairs of runs with the same seed.",
        "",
        "## The rate of each side",
        "",
        *rate_table(found),
    ]
    if "best" in found:
        lines += ["", f"## At the best rates (target {found['target']})", "", *arm_table(found["best"])]
        lines += ["", "## At the high rate", "", *arm_table(found["high"])]
        lines += ["", "## Step by step", "", "![what the steps log](remedies.svg)", "", *step_table(found)]
    for row in found.get("slower", ()):
        lines += [
            "",
            f"`synchronous` at {row['rate']:g}, the mean rate of `ess`: {row['final_accuracy']:.3f}; `ess` minus it:",
        ]
        lines += [f"{interval(row['difference'])}."]
    if any(found.get("own_rate", {}).values()):
        lines += ["", "## The rate of each remedy of training", "", *own_rate_table(found["own_rate"])]
    if found.get("confirm"):
        lines += ["", "## Confirmation, at fresh seeds", "", *confirm_table(found["confirm"])]
    if "warnings" in found:
        told = found["warnings"]
        lines += ["", "## What tells a rate that is too high", ""]
        lines += [f"{told['collapsed']} of {told['runs']} runs ended more than {COLLAPSED} below {told['level']}.", ""]
        lines += warning_table(found)
        lines += [""] + [
            f"Partial runs {where}: `april train` warns in {count['warned']} of {count['runs']}."
            for where, count in found["warned"].items()
        ]
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """What the steps log, of both baselines at both rates."""
    from plots import ARMS as COLOURS
    from plots import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(9, 4.6), sharex=True)
    for axis, name in zip(axes.flat, SHOWN, strict=True):
        for arm, colour in COLOURS.items():
            for rate, line in (("best", "-"), ("high", ":")):
                if logged := found["by_step"][f"{arm}, {rate}"]:
                    steps = range(1, len(logged[name]) + 1)
                    axis.plot(steps, logged[name], line, color=colour, label=f"{arm}, {rate} rate")
        axis.set_title(name.replace("_", " "), fontsize=9, loc="left")
        axis.grid(axis="y", color="#eeeeee")
    axes[0, 0].legend(frameon=False, fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--study", type=Path, default=HERE / "remedies.jsonl")
    arguments = parser.parse_args()
    found, directory = analyse(recorded(arguments.study)), arguments.study.parent
    (directory / "remedies_analysis.json").write_text(json.dumps(found, indent=2) + "\n")
    (directory / "remedies.md").write_text(page(found))
    if "by_step" in found:
        draw(found, directory / "remedies.svg")
    print(f"{found['runs']} runs: remedies_analysis.json, remedies.md, remedies.svg")


if __name__ == "__main__":
    main()
