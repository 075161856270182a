"""Runs of one recipe in several arms, as one table: medians over seeds with their spread, and ratios paired by seed.

Invariant: an arm is compared with the first one seed by seed, so that a seed both ran is the only thing a ratio pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROWS = {
    "consumed_tokens_per_second": ("consumed tokens/s", "{:,.0f}", True),
    "generated_tokens_per_second": ("generated tokens/s", "{:,.0f}", True),
    "rollout_seconds": ("rollout seconds", "{:.1f}", True),
    "time_to_target": ("seconds to target", "{:.1f}", True),
    "final_accuracy": ("final accuracy", "{:.3f}", False),
    "mean_staleness": ("mean staleness", "{:.2f}", False),
    "max_staleness_seen": ("largest staleness", "{:.0f}", False),
    "off_policy_token_share": ("off-policy tokens", "{:.0%}", False),
    "discarded_tokens": ("discarded tokens", "{:.0f}", False),
    "slots": ("engine slots", "{:.0f}", False),
}
"""What is compared: its name for people, its format, and whether a ratio to the first arm makes sense."""


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
    for name, (title, form, ratio) in ROWS.items():
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
            ratios.append("" if arm == arms[0] or not pairs else _cell(pairs, "× {:.2f}", len(pairs)))
        table.add_row(title, *cells)
        if any(ratios):
            table.add_row("", *ratios, style="bold")
    (console or Console()).print(table)
    return result


def _spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"median": None, "min": None, "max": None, "runs": 0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def _cell(values: Sequence[float], form: str, runs: int) -> str:
    if not values:
        return "never" if runs else "-"
    text = form.format(statistics.median(values))
    if min(values) != max(values):
        text += f" ({form.format(min(values)).removeprefix('× ')} to {form.format(max(values)).removeprefix('× ')})"
    return text if len(values) == runs else f"{text}, {len(values)} of {runs} runs"
