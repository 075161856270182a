"""Runs of one recipe in several arms, as one table: medians over seeds with their spread, and ratios paired by seed.

Invariant: an arm is compared with the first one seed by seed, so that a seed both ran is the only thing a ratio pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from april.reporting.formats import Format
from april.reporting.metrics import METRICS, busy_seconds
from april.rollout.batch import rate

ROWS = {
    "time_to_target": True,
    "overall_tokens_per_second": True,
    "rollout_seconds": True,
    "consumed_tokens_per_second": True,
    "generated_tokens_per_second": True,
    "eval_reward": False,
    "accuracy": False,
    "staleness_mean": False,
    "staleness_max": False,
    "off_policy_token_share": False,
    "discarded_tokens": False,
    "slots": False,
    "buffer_bytes": True,
    "kv_cache_bytes": True,
    "resident_bytes": True,
}
"""Compared metrics, most important first, and whether a ratio to the first arm is meaningful."""

MEMORY = {"buffer_bytes", "kv_cache_bytes", "resident_bytes"}


def run_record(arm: str, seed: int, summary: Mapping[str, Any], slots: int, target: float) -> dict[str, Any]:
    """Record of one run in a comparison.

    Args:
        summary: summary of the run, see `RunLog.summary`.
        target: the held-out reward whose time is compared, in seconds of rollouts and training.
    """
    evaluations, spent = summary["evaluations"], busy_seconds(summary)
    return {
        "arm": arm,
        "seed": seed,
        **{name: summary.get(name) for name in (*ROWS, "train_seconds", "overlap_seconds")},
        "overall_tokens_per_second": rate(summary.get("consumed_tokens") or 0, spent) or None,
        "time_to_target": time_to_target(evaluations, target),
        "slots": slots,
        "evaluations": evaluations,
        "versions": summary["versions"],
    }


def time_to_target(evaluations: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Return the seconds of rollouts and training until the held-out reward first reached `target`; None if it never
    did. Between two evaluations the reward is assumed to change at a constant rate, or a run that misses the target by
    a hair would be charged all steps until the next evaluation."""
    last, began = -inf, 0.0
    for found in evaluations:
        reward, seconds = _number(found["eval_reward"]), float(found["training_seconds"])
        if reward >= target:
            return seconds if last == -inf else began + (seconds - began) * (target - last) / (reward - last)
        last, began = reward, seconds
    return None


def compare_runs(records: Sequence[Mapping[str, Any]], console: Console | None = None) -> dict[str, Any]:
    """Print the comparison and return it as JSON types.

    Args:
        records: one per run: `arm`, `seed`, and the values of `ROWS`; None for a target never reached.
    """
    arms = list(dict.fromkeys(record["arm"] for record in records))
    base = {record["seed"]: record for record in records if record["arm"] == arms[0]}
    result: dict[str, Any] = {}
    table = Table(box=box.SIMPLE_HEAD, title="median over seeds (least to most); × the first arm, seed by seed")
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right")
    for name, ratio in ROWS.items():
        if name in MEMORY and not any(record.get(name) for record in records):
            continue  # the engine does not report its memory
        title, form = METRICS[name].label, METRICS[name].form
        cells, ratios = [], []
        for arm in arms:
            own = [record for record in records if record["arm"] == arm]
            values = [record[name] for record in own if record.get(name) is not None]
            pairs = [
                record[name] / base[record["seed"]][name]
                for record in own
                if ratio and record.get(name) and base.get(record["seed"], {}).get(name)
            ]
            result.setdefault(arm, {})[name] = _spread(values) | ({"ratio": _spread(pairs)} if ratio else {})
            cells.append(_cell(values, form, len(own)))
            ratios.append("" if arm == arms[0] or not pairs else _cell(pairs, _times, len(pairs)))
        table.add_row(title, *cells)
        if any(ratios):
            table.add_row("", *ratios, style="bold")
    console = console or Console()
    console.print(table)
    console.print(_headline(arms, result, all(record.get("time_to_target") for record in records)))
    return result


def _headline(arms: Sequence[str], result: Mapping[str, Any], reached: bool) -> str:
    """Return the result in one sentence: by the time to the target if all runs reached it, otherwise by throughput."""
    name, title = (
        ("time_to_target", "Time to the target reward")
        if reached
        else ("overall_tokens_per_second", "Not all runs reached the target reward. Overall tokens/s")
    )
    ratios = {arm: result[arm][name]["ratio"]["median"] for arm in arms[1:]}
    parts = [f"{arm} {_times(ratio)}" for arm, ratio in ratios.items() if ratio is not None]
    return f"{title}, relative to {arms[0]}: {', '.join(parts) or 'no pair of runs to compare'}"


def _number(value: float | None) -> float:
    """Return a metric as a number; null (not finite) becomes a number below all others."""
    return -inf if value is None else value


def _times(ratio: float) -> str:
    return f"× {ratio:.2f}"


def _spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"median": None, "min": None, "max": None, "runs": 0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def _cell(values: Sequence[float], form: Format, runs: int) -> str:
    if not values:
        return "never" if runs else "-"
    text = form(statistics.median(values))
    if min(values) != max(values):
        text += f" ({form(min(values)).removeprefix('× ')} to {form(max(values)).removeprefix('× ')})"
    return text if len(values) == runs else f"{text}, {len(values)} of {runs} runs"
