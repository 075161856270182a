"""The report of a run: one HTML file made from what the run directory holds, at any time during the run or after it.

Every figure comes from the run's files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from april.disk import write_whole
from april.reporting.browser import browser
from april.reporting.faults import described, read_faults
from april.reporting.formats import clock, compact
from april.reporting.html import Section, Tile, folded, page
from april.reporting.metrics import failures_in, metric, show
from april.reporting.plots import plots_of
from april.reporting.run import Run, measured

FILE_NAME = "report.html"
MAX_FAULTS = 100
"""Rows of the table of faults; the latest are shown."""


def write_report(run_directory: Path | str, refresh: int = 0) -> Path:
    """Write `report.html` into a run directory and return its path. The page is self-contained.

    Args:
        refresh: seconds after which a browser loads it again, while the run has not ended.

    Raises:
        FileNotFoundError: the directory holds no `metrics.jsonl`.
    """
    run = Run.read(Path(run_directory))
    sections = [_note(run)] if not run.steps else plots_of(run)
    sections += [browser(run.directory), _faults(run), _numbers(run), _devices(run), _recipe(run)]
    versions = ", ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items())
    text = page(
        run.directory.resolve().name,
        _subtitle(run),
        _tiles(run),
        [section for section in sections if section.body],
        f"Written by april report from metrics.jsonl, trace.jsonl and summary.json. {versions}",
        0 if run.summary else refresh,
        outcome(run),
    )
    path = run.directory / FILE_NAME
    write_whole(path, text)
    return path


def follow(run_directory: Path | str, interval: int) -> Path:
    """Rewrite the report every `interval` seconds until the run has ended; an open page reloads itself."""
    while True:
        path = write_report(run_directory, refresh=interval)
        if (Path(run_directory) / "summary.json").exists():
            return path
        time.sleep(interval)


def _subtitle(run: Run) -> str:
    settings = _flat(run.summary.get("recipe", {}))
    partial = next((value for key, value in settings.items() if key.split(".")[-1] == "partial_rollout"), None)
    steps = run.steps[-1]["step"] if run.steps else 0
    parts = [f"{steps:,} step{'' if steps == 1 else 's'}"]
    if partial is not None:
        parts.append("active partial rollouts" if partial else "synchronous rollouts")
    if not run.summary:
        parts.append("no summary yet: the run is in progress or was interrupted")
    return " · ".join(parts)


def outcome(run: Run) -> str:
    """Return the result of the run so far in one or two sentences; empty before the first step."""
    if not run.steps:
        return ""

    def total(name: str) -> str:
        return show(name, run.totals.get(name))

    steps = len(run.steps)
    sentence = f"{steps:,} training step{'' if steps == 1 else 's'} took {clock(run.totals.get('seconds') or 0.0)}"
    if (found := run.evaluations("eval_reward"))[1:]:
        verb = "rose" if found[-1] > found[0] else "fell" if found[-1] < found[0] else "stayed"
        first, last = (show("eval_reward", value) for value in (found[0], found[-1]))
        sentence += f", and the held-out reward {verb} " + (
            f"at {last}" if verb == "stayed" else f"from {first} to {last}"
        )
    parts = [sentence + "."]
    if run.totals.get("engine_occupancy") is not None:
        parts.append(
            f"The engine was {total('engine_occupancy')} occupied during rollouts and delivered "
            f"{total('consumed_tokens_per_second')} trained tokens per second, at a mean staleness of "
            f"{total('staleness_mean')} weight updates."
        )
    faults = sum(failures_in(run.totals.values()).values())
    parts.append(f"{faults:,} fault{'' if faults == 1 else 's'} occurred." if faults else "No faults occurred.")
    return " ".join(parts)


def _tiles(run: Run) -> list[Tile]:
    def total(name: str, form: Any = None) -> str:
        value = run.totals.get(name)
        return show(name, value) if form is None or value is None else str(form(value))

    spent = f"{total('rollout_seconds', clock)} rolling out, {total('train_seconds', clock)} training"
    if run.totals.get("overlap_seconds"):
        spent += f", {total('overlap_seconds', clock)} of them both"
    return [
        _held_out(run),
        Tile("Consumed tokens/s", total("consumed_tokens_per_second"), "trained on, per second of rollout"),
        Tile("Engine occupancy", total("engine_occupancy"), "of the slots, while rolling out"),
        Tile("Wall clock", total("seconds"), spent),
        Tile("Tokens trained on", total("consumed_tokens"), f"of {total('generated_tokens')} generated"),
        Tile("Staleness", total("staleness_mean"), f"updates on average, {total('staleness_max')} at most"),
        Tile("Off-policy tokens", total("off_policy_token_share"), "drawn by an earlier policy version"),
        Tile("Discarded tokens", total("discarded_tokens"), "sampled, then thrown away"),
    ]


def _held_out(run: Run) -> Tile:
    if not run.evaluations("eval_reward"):
        return Tile("Held-out reward", "not evaluated")
    accuracy = f"accuracy {_arrow(run, 'accuracy')}" if run.evaluations("accuracy") else "before and after training"
    return Tile("Held-out reward", _arrow(run, "eval_reward"), accuracy)


def _arrow(run: Run, name: str) -> str:
    found = run.evaluations(name)
    return " → ".join(show(name, value) for value in dict.fromkeys((found[0], found[-1])))


def _note(run: Run) -> Section:
    return Section("No step yet", f'<p class="missing">No training step of {escape(run.directory.name)} is done.</p>')


def _faults(run: Run) -> Section:
    rows = [(record["step"], what, why) for record in read_faults(run.directory) for what, why in described(record)]
    if not rows:
        return Section("", "")
    cells = [
        f'<tr><td>{step}</td><td class="text">{escape(what)}</td><td class="text">{escape(why)}</td></tr>'
        for step, what, why in rows[-MAX_FAULTS:]
    ]
    head = '<tr><th>step</th><th class="text">what</th><th class="text">why</th></tr>'
    return Section(
        "Faults",
        f'<div class="scroll"><table>{head}{"".join(cells)}</table></div>',
        f"What went wrong and was survived, the latest {len(cells)} of {len(rows)}; faults.jsonl has all of it. A "
        "quarantined group was left out, and another took its place in the step.",
    )


def _numbers(run: Run) -> Section:
    names = dict.fromkeys(name for record in run.metrics for name in record if name != "step")
    rows = []
    for name in sorted(names, key=lambda name: metric(name).section):
        if found := measured(run.metrics, name):
            figures = (found[0], found[-1], float(np.mean(found)), min(found), max(found))
            cells = "".join(f"<td>{compact(value)}</td>" for value in figures)
            rows.append(f"<tr><td>{escape(metric(name).title)}</td><td>{escape(name)}</td>{cells}</tr>")
    if not rows:
        return Section("", "")
    head = "<tr><th>metric</th><th>name</th><th>first</th><th>last</th><th>mean</th><th>min</th><th>max</th></tr>"
    return Section(
        "", folded("Every metric in numbers", f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>')
    )


def _devices(run: Run) -> Section:
    rows = "".join(
        f'<tr><td>{escape(gpu)}</td><td class="text">{escape(task)}</td></tr>'
        for gpu, task in run.summary.get("devices", ())
    )
    return Section("GPUs", f"<table>{rows}</table>" if rows else "")


def _recipe(run: Run) -> Section:
    recipe = run.summary.get("recipe")
    return Section("", folded("Resolved recipe", f"<pre>{escape(recipe_text(recipe))}</pre>") if recipe else "")


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Nested settings in the manner of a TOML file, one table after another."""
    tables: dict[str, list[str]] = {}
    for path, value in _flat(recipe).items():
        table, _, key = path.rpartition(".")
        text = f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}" if value is not None else f"# {key}"
        tables.setdefault(table, []).append(text)
    # In TOML, keys without a table have to precede the first table.
    ordered = sorted(tables, key=bool)
    return "\n\n".join("\n".join([f"[{name}]"] * bool(name) + tables[name]) for name in ordered)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return flat
