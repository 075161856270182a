"""The figures of the accuracy study as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COSTS = ("samples", "generated_tokens", "cpu_seconds")

Figures = Mapping[str, Any]


def tables(found: Figures) -> str:
    """What `analysis.analyse` found, for people."""
    sections = (partial(found["main"]), longer(found["long"]), kept(found["keep"]), staleness(found["staleness"]))
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def partial(main: Figures) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield f"Made by `analysis.py` from `study.jsonl`. Brackets: {INTERVAL}."
    yield ""
    yield "## Partial against synchronous"
    yield ""
    yield from head("task", "algorithm", "pairs", "synchronous", "partial", "difference")
    for r in main["rows"]:
        means = [f"{r[arm]['mean']:.3f}" for arm in ("synchronous", "partial")]
        yield row(r["task"], r["algorithm"], r["runs_per_arm"], *means, interval(r["accuracy_difference"]))
    yield ""
    targets = ", ".join(f"{task} {target:.2f}" for task, target in main["targets"].items())
    yield f"What the target took ({targets}), partial / synchronous, over the pairs in which both arms reached it:"
    yield ""
    yield from head("runs", "difference", *(f"{cost.replace('_', ' ')}" for cost in COSTS), "reached it")
    for name, group in [*((n, g) for groups in main["by"].values() for n, g in groups.items()), ("all", main["all"])]:
        if runs := group["runs_per_arm"]:
            ratios = [interval(group["ratios"][f"{cost}_to_target"], "{:.2f}") for cost in COSTS]
            reached = " and ".join(f"{count} of {runs}" for count in group["reached_target"].values())
            yield row(name, interval(group["accuracy_difference"]), *ratios, reached)


def longer(rows: Sequence[Figures]) -> Iterator[str]:
    yield "## Three times the steps"
    yield ""
    yield from head("task", "algorithm", "pairs", "synchronous", "partial", "difference", "difference by step")
    for r in rows:
        means = [f"{r[arm]['mean']:.3f}" for arm in ("synchronous", "partial")]
        by_step = ", ".join(f"{step}: {value:+.2f}" for step, value in r["difference_by_step"].items() if step)
        yield row(r["task"], r["algorithm"], r["difference"]["pairs"], *means, interval(r["difference"]), by_step)


def kept(rows: Sequence[Figures]) -> Iterator[str]:
    yield "## KV caches kept or computed anew"
    yield ""
    yield "GRPO, partial rollouts, N'/N = 2. The difference is keep minus recompute."
    yield ""
    yield from head("task", "pairs", "recompute", "keep", "difference")
    for r in rows:
        if pairs := r["difference"]["pairs"]:
            means = [f"{r[arm]['mean']:.3f}" for arm in ("recompute", "keep")]
            yield row(r["task"], pairs, *means, interval(r["difference"]))


def staleness(grid: Figures) -> Iterator[str]:
    yield "## Staleness and correction"
    yield ""
    yield f"gcd, GRPO. Synchronous: {grid['synchronous']['mean']} over {grid['synchronous']['runs']} seeds."
    yield ""
    titles = ("N'/N", "bound", "correction", "runs", "accuracy", "difference", "mean staleness", "breaks")
    yield from head(*titles)
    for r in grid["rows"]:
        if runs := r["accuracy"]["runs"]:
            bound = "none" if r["max_staleness"] is None else r["max_staleness"]
            verdict = {None: "too few runs", True: "yes", False: "no"}[r["breaks"]]
            accuracy, difference = f"{r['accuracy']['mean']:.3f}", interval(r["difference"])
            setting = (f"{r['over_sampling']:g}", bound, r["correction"])
            yield row(*setting, runs, accuracy, difference, f"{r['mean_staleness']:.2f}", verdict)
    yield ""
    yield "Without a bound, the difference from the synchronous runs of the same seed, in brackets the runs:"
    yield ""
    columns = list(next(iter(grid["by_correction"].values()), {}))
    yield from head("correction", *("all" if name == "all" else f"N'/N = {name}" for name in columns))
    for correction, found in grid["by_correction"].items():
        yield row(correction, *(f"{interval(found[name])} ({found[name]['pairs']})" for name in columns))
    yield ""
    yield "What a bound adds: the difference from the run of the same seed at the same N'/N without one."
    yield ""
    yield from head("correction", *(f"bound {bound}" for bound in grid["bounds"]["all"]))
    for correction, found in grid["bounds"].items():
        yield row(correction, *(f"{interval(gain)} ({gain['pairs']})" for gain in found.values()))


INTERVAL = "95 % bootstrap interval of the mean over pairs of runs with the same seed"


def head(*titles: str) -> Sequence[str]:
    return row(*titles), "|---" * len(titles) + "|"


def row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def interval(found: Figures, form: str = "{:+.3f}") -> str:
    if found["mean"] is None:
        return "-"
    text = form.format(found["mean"])
    return text if found["low"] is None else f"{text} [{form.format(found['low'])}, {form.format(found['high'])}]"
