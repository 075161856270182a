"""The report of a run: one HTML file made from what the run directory holds, at any time during the run or after it.

Nothing is computed here that `metrics.jsonl`, `trace.jsonl` or `summary.json` does not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.reporting import trace
from april.reporting.charts import (
    THIRD,
    WIDE,
    Axis,
    Series,
    Value,
    clock,
    compact,
    histogram,
    legend_of,
    line_chart,
    missing,
    percent,
    seconds,
    stacked_chart,
)
from april.reporting.faults import read_faults, told
from april.reporting.html import Section, Tile, folded, page, row
from april.reporting.metrics import read_metrics
from april.reporting.step_log import scan
from april.reporting.timeline import LEGEND, timeline
from april.rollout.disk import write_whole

FILE_NAME = "report.html"
MAX_POINTS = 400
"""Points along a plot's x axis; a longer run is drawn with several steps to a point."""
MAX_COLUMNS = 120
MAX_FAULTS = 100
"""Rows of the table of faults; the latest are shown."""
AGES = 6
"""Policy ages shown apart; the last one stands for itself and all older."""
LAST_VALUE = frozenset({"step", "seconds", "epoch", "policy_version", "consumed_tokens", "generated_tokens", "lr"})
Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What the report keeps of every step's trace; the spans stay in the file, from byte `offset` on."""

    step: int
    offset: int
    lengths: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    interrupted: int
    resumed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory as the report needs it. `metrics` are by step, `steps` those of them that trained."""

    directory: Path
    metrics: list[Metrics]
    steps: list[Metrics]
    traced: list[TracedStep]
    summary: Metrics

    @classmethod
    def read(cls, directory: Path) -> Run:
        metrics: list[Metrics] = list(read_metrics(directory))
        summary_file = directory / "summary.json"
        summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.exists() else {}
        steps = [record for record in metrics if record["step"] > 0]
        return cls(directory, metrics, steps, _traced_steps(directory / trace.FILE_NAME), summary)


def write_report(run_directory: Path | str) -> Path:
    """Write `report.html` into a run directory and return its path. The page is self-contained.

    Raises:
        FileNotFoundError: the directory holds no `metrics.jsonl`.
    """
    run = Run.read(Path(run_directory))
    sections = [_note(run)] if not run.steps else _sections(run)
    sections += [_faults(run), _numbers(run), _recipe(run)]
    versions = ", ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items())
    text = page(
        run.directory.resolve().name,
        _subtitle(run),
        _tiles(run),
        [section for section in sections if section.body],
        f"Written by april report from metrics.jsonl, trace.jsonl and summary.json. {versions}",
    )
    path = run.directory / FILE_NAME
    write_whole(path, text)
    return path


def _sections(run: Run) -> list[Section]:
    return [
        _learning(run),
        _lengths(run),
        _timeline(run),
        _ages(run),
        _throughput(run),
        _staleness(run),
        _admission(run),
        _phases(run),
        _optimisation(run),
    ]


def _subtitle(run: Run) -> str:
    settings = _flat(run.summary.get("recipe", {}))
    partial = next((value for key, value in settings.items() if key.split(".")[-1] == "partial_rollout"), None)
    kind = None if partial is None else "active partial rollouts" if partial else "synchronous rollouts"
    steps = run.summary.get("steps", run.steps[-1]["step"] if run.steps else 0)
    parts = [f"{steps:,} step{'' if steps == 1 else 's'}"]
    if run.metrics and "seconds" in run.metrics[-1]:
        parts.append(f"{clock(run.metrics[-1]['seconds'])} of wall clock")
    if kind:
        parts.append(kind)
    if not run.summary:
        parts.append("no summary yet: the run is going on or was cut short")
    return " · ".join(parts)


def _tiles(run: Run) -> list[Tile]:
    last = run.steps[-1] if run.steps else {}
    accuracies = [record["accuracy"] for record in run.metrics if record.get("accuracy") is not None]
    before = _first(run.summary.get("accuracy_before"), accuracies[0] if accuracies else None)
    after = _first(run.summary.get("accuracy_after"), accuracies[-1] if accuracies else None)
    consumed = _first(run.summary.get("consumed_tokens"), last.get("consumed_tokens"))
    generated = _first(run.summary.get("generated_tokens"), last.get("generated_tokens"))
    rollout = _first(run.summary.get("rollout_seconds"), _total(run.steps, "rollout_seconds"))
    train = _first(run.summary.get("train_seconds"), _total(run.steps, "train_seconds"))
    speed = _first(run.summary.get("consumed_tokens_per_second"), consumed / rollout if consumed and rollout else None)
    stale = _first(run.summary.get("mean_staleness"), _mean(run.steps, "staleness_mean"))
    stalest = _first(run.summary.get("max_staleness_seen"), _largest(run.steps, "staleness_max"))
    off_policy = _first(run.summary.get("off_policy_token_share"), _mean(run.steps, "off_policy_token_share"))
    occupancy = _weighted(run.steps, "engine_occupancy", "rollout_seconds")
    discarded = run.summary.get("discarded_tokens")
    return [
        Tile("Held-out accuracy", _arrow(before, after), "before and after training"),
        Tile("Consumed tokens/s", _show(speed), "trained on, per second of rollout"),
        Tile("Engine occupancy", _show(occupancy, percent), "of the slots, while rolling out"),
        Tile("Wall clock", _show(rollout, clock), f"rolling out, and {_show(train, clock)} training"),
        Tile("Tokens trained on", _show(consumed), f"of {_show(generated)} generated"),
        Tile("Staleness", _show(stale), f"updates on average, {_show(stalest)} at most"),
        Tile("Off-policy tokens", _show(off_policy, percent), "drawn by an earlier policy version"),
        Tile("Discarded tokens", _show(discarded), "sampled, then thrown away"),
    ]


def _note(run: Run) -> Section:
    return Section("No step yet", f'<p class="missing">No training step of {escape(run.directory.name)} is done.</p>')


def _learning(run: Run) -> Section:
    records = condense(run.metrics, MAX_POINTS)
    rewards = _values(records, "reward")
    smooth = _trailing_mean(rewards, len(records) // 12)
    series = [
        Series("reward, each step", rewards, "c-blue", faint=True),
        Series("reward" if smooth == rewards else "reward (trailing mean)", smooth, "c-blue"),
        Series("held-out accuracy", _values(records, "accuracy"), "c-amber", dots=True),
    ]
    label = "Reward and held-out accuracy"
    parts = [("over steps", line_chart(label, _axis(records), series))]
    if all("seconds" in record for record in records):
        by_time = Axis([r["seconds"] for r in records], "wall clock", _heads(records), time=True)
        parts.append(("over wall-clock time", line_chart(label, by_time, series)))
    return Section(
        "Reward and accuracy",
        row(*parts),
        "The reward is what the policy earned on the prompts it trained on; the accuracy is its score on held-out "
        "problems it never trains on. The left plot says how much each step taught, the right one how soon.",
    )


def _lengths(run: Run) -> Section:
    traced = [step for step in run.traced if len(step.lengths)]
    if not traced:
        return Section("Response lengths", missing("Response lengths"))
    count = min(20, max(1, len(traced) // 10))
    ends = [traced] if len(traced) == 1 else [traced[:count], traced[-count:]]
    high = 1.04 * max(int(step.lengths.max()) for end in ends for step in end)
    # The tallest bin decides where both y axes end.
    pools = [(np.concatenate([s.lengths for s in end]), np.concatenate([s.truncated for s in end])) for end in ends]
    top = 2.5 * max(int(np.histogram(lengths, 56, (0, high))[0].max()) for lengths, _ in pools)
    plots = []
    for end, (lengths, truncated) in zip(ends, pools, strict=True):
        name = f"steps {end[0].step} to {end[-1].step}" if len(end) > 1 else f"step {end[0].step}"
        cut = f"{int(truncated.sum()):,} truncated" if truncated.any() else "none truncated"
        title = f"{name}: {len(lengths):,} responses, {cut}"
        plot = histogram(
            f"Response lengths, {title}",
            lengths.tolist(),
            truncated.tolist(),
            high=high,
            top=top,
            size=(WIDE[0], 210),
            x_title="response length in tokens" if end is ends[-1] else "",
        )
        plots.append(f"<h3>{escape(title)}</h3>{plot}")
    legend = legend_of([Series("responses", [], "c-blue"), Series("of them truncated", [], "c-red")])
    return Section(
        "Response lengths",
        legend + "".join(plots),
        "A synchronous step lasts as long as its longest response, so the tail to the right of p99 is what active "
        "partial rollouts take off the critical path. Comparing the first steps with the last shows what training did "
        "to the lengths (counts are on a logarithmic scale); red marks responses that ran out of their budget.",
    )


def _timeline(run: Run) -> Section:
    picks = pick_steps(run.traced)
    if not picks:
        return Section("One step, sample by sample", missing("Timeline"))
    options, parts = [], []
    for index, (step, reason) in enumerate(picks):
        facts = f"{step.interrupted} interrupted, {step.resumed} resumed"
        options.append(f'<option value="{step.step}">step {step.step}, {reason}: {facts}</option>')
        drawing = timeline(_load(run.directory, step))
        hidden = " hidden" if index else ""
        parts.append(
            f'<div class="timeline" data-step="{step.step}"{hidden}><div class="plot wide">{drawing}</div></div>'
        )
    legend = legend_of([Series(name, [], style) for style, name in LEGEND])
    select = f'<select id="pick" aria-label="step to show">{"".join(options)}</select>'
    return Section(
        "One step, sample by sample",
        f'<div class="steps">{legend}{select}</div>{"".join(parts)}',
        "Each bar is a sample while it decoded, in the order in which samples got a slot, and the strip above counts "
        "the slots at work. At the line the step had its groups: what was still decoding was interrupted with all its "
        "tokens kept, and goes on in the next step. Point at a bar to see its group.",
    )


def _ages(run: Run) -> Section:
    records = [r for r in condense(run.steps, MAX_POINTS) if r.get("tokens_by_age") and sum(r["tokens_by_age"])]
    oldest = max((len(record["tokens_by_age"]) for record in records), default=0)
    bands = min(oldest, AGES)
    tokens = [[*r["tokens_by_age"][: bands - 1], sum(r["tokens_by_age"][bands - 1 :])] for r in records]
    tokens = [counts + [0] * (bands - len(counts)) for counts in tokens]
    series, notes = [], []
    for age in range(bands):
        name = "on-policy" if age == 0 else f"{age} update{'' if age == 1 else 's'} old"
        if age == AGES - 1 and oldest > AGES:
            name = f"{age} or more updates old"
        shares = [counts[age] / sum(counts) for counts in tokens]
        series.append(Series(name, shares, f"c-age{age}"))
        notes.append(
            [f"{percent(share)}, {counts[age]:,.0f} tokens" for share, counts in zip(shares, tokens, strict=True)]
        )
    chart = stacked_chart(
        "Share of tokens trained on, by policy age",
        _axis(records),
        series,
        y_format=percent,
        y_range=(0, 1),
        notes=notes,
    )
    return Section(
        "Tokens by policy age",
        chart,
        "How old the policy that sampled each token was when the token was trained on, in weight updates. Blue is "
        "on-policy; everything above it was kept from interrupted samples rather than thrown away, and is corrected "
        "for in the loss.",
    )


def _throughput(run: Run) -> Section:
    records = condense(run.steps, MAX_POINTS)
    axis = _axis(records)
    speeds = [
        Series("generated", _values(records, "generated_tokens_per_second"), "c-grey"),
        Series("consumed", _values(records, "consumed_tokens_per_second"), "c-blue"),
    ]
    occupancy = [Series("slots decoding", _values(records, "engine_occupancy"), "c-green")]
    return Section(
        "Throughput and occupancy",
        row(
            ("tokens per second of rollout", line_chart("Tokens per second", axis, speeds, y_range=(0, None))),
            (
                "engine occupancy",
                line_chart("Engine occupancy", axis, occupancy, y_format=percent, y_range=(0, 1.02)),
            ),
        ),
        "Generated tokens are what the engine sampled during a step; consumed tokens are what the step handed to "
        "training, which work begun earlier can raise above what the step itself generated. Occupancy is the share "
        "of the engine's slots that were decoding, averaged over the rollout: what the long tail empties and partial "
        "rollouts keep full.",
    )


def _staleness(run: Run) -> Section:
    records = condense(run.steps, MAX_POINTS)
    axis = _axis(records)
    staleness = [
        Series("maximum", _values(records, "staleness_max"), "c-purple"),
        Series("mean", _values(records, "staleness_mean"), "c-blue"),
    ]
    samples = [
        Series("interrupted", _values(records, "samples_interrupted"), "c-amber"),
        Series("resumed", _values(records, "samples_resumed"), "c-green"),
    ]
    return Section(
        "Staleness",
        row(
            ("staleness of groups, in weight updates", line_chart("Staleness", axis, staleness, y_range=(0, None))),
            ("samples interrupted and resumed", line_chart("Samples", axis, samples, y_range=(0, None))),
        ),
        "A group's staleness is the number of weight updates between its first token and the step that trains on it. "
        "The maximum never exceeds max_staleness; the mean follows from how many more groups are started than a step "
        "needs.",
    )


def _admission(run: Run) -> Section:
    records = condense(run.steps, MAX_POINTS)
    if not _measured(records, "expected_consumed_tokens_per_second"):
        return Section("", "")
    axis = _axis(records)
    target = [Series("groups under way", _values(records, "over_sampling_batch_size"), "c-blue")]
    speeds = [
        Series("got", _values(records, "consumed_tokens_per_second"), "c-blue"),
        Series("expected in the long run", _values(records, "expected_consumed_tokens_per_second"), "c-amber"),
    ]
    lengths = [
        Series("trained on", _values(records, "response_length_mean"), "c-blue"),
        Series("of the task, unfinished ones counted", _values(records, "response_length_expected"), "c-amber"),
    ]
    last = next((r["admission_reason"] for r in reversed(run.steps) if r.get("admission_reason")), "")
    return Section(
        "Admission and lengths",
        row(
            ("groups under way (N')", line_chart("Groups under way", axis, target, y_range=(0, None))),
            ("consumed tokens per second", line_chart("Expected and got", axis, speeds, y_range=(0, None))),
            ("mean response length, in tokens", line_chart("Mean length", axis, lengths, y_range=(0, None))),
        )
        + f"<p>{escape(f'Last decision: {last}.')}</p>",
        "How many groups were kept under way, what that was expected to bring and what it brought. The last plot shows "
        "whether training sees the answers that the task has: the first steps lack the long ones, which are still "
        "unfinished; after that the two lines run together if nothing is biased against long answers.",
    )


def _phases(run: Run) -> Section:
    records = condense(run.steps, MAX_COLUMNS)
    names = (
        ("rollout", "rollout_seconds", "c-blue"),
        ("training", "train_seconds", "c-amber"),
        ("evaluation", "eval_seconds", "c-purple"),
    )
    series = [Series(name, _values(records, key), style) for name, key, style in names if _measured(records, key)]
    return Section(
        "Time per phase",
        stacked_chart("Seconds per step, by phase", _axis(records), series, y_format=seconds, columns=True),
        "Where each step's wall-clock time went. Rollout is the part that active partial rollouts shorten; training "
        "and evaluation cost the same with them or without.",
    )


def _optimisation(run: Run) -> Section:
    records = condense(run.steps, MAX_POINTS)
    axis = _axis(records)
    names = {
        "loss": "loss",
        "grad_norm": "gradient norm",
        "entropy": "entropy in nats",
        "kl_behaviour": "KL to the behaviour policy",
        "clip_fraction": "share of tokens clipped",
        "ratio_max": "largest importance ratio",
        "response_length_mean": "mean response length",
        "truncated_share": "share of responses truncated",
        "lr": "learning rate",
    }
    parts = [
        (name, line_chart(name, axis, [Series(name, _values(records, key), "c-blue")], size=THIRD, legend=False))
        for key, name in names.items()
        if _measured(records, key)
    ]
    if not parts:
        return Section("", "")
    return Section(
        "Optimisation",
        row(*parts, thirds=True),
        "What the optimiser saw. A healthy run keeps the gradient norm and the KL to the policy that sampled the "
        "tokens small, and loses entropy slowly.",
    )


def _faults(run: Run) -> Section:
    rows = [(record["step"], what, why) for record in read_faults(run.directory) for what, why in told(record)]
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
    names = dict.fromkeys(name for record in run.steps for name in record if name != "step")
    rows = []
    for name in names:
        values = [v for v in _values(run.steps, name) if v is not None]
        if values:
            figures = (values[0], values[-1], float(np.mean(values)), min(values), max(values))
            rows.append(f"<tr><td>{escape(name)}</td>{''.join(f'<td>{compact(value)}</td>' for value in figures)}</tr>")
    if not rows:
        return Section("", "")
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>mean</th><th>min</th><th>max</th></tr>"
    return Section(
        "", folded("Every metric in numbers", f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>')
    )


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
    ordered = sorted(tables, key=bool)
    return "\n\n".join("\n".join([f"[{name}]"] * bool(name) + tables[name]) for name in ordered)


def pick_steps(traced: Sequence[TracedStep]) -> list[tuple[TracedStep, str]]:
    """The few steps whose timelines the page holds, the representative one first.

    That is the step of the run's middle third with the most interrupted samples. With it come the first, the last,
    the one that resumed most and the longest.
    """
    if not traced:
        return []
    third = len(traced) // 3
    middle = traced[third : len(traced) - third]
    reasons = [
        (max(middle, key=lambda step: step.interrupted), "from the middle of the run"),
        (traced[0], "the first"),
        (traced[-1], "the last"),
        (max(traced, key=lambda step: step.resumed), "the most resumed"),
        (max(traced, key=lambda step: step.seconds), "the longest"),
    ]
    picks: dict[int, tuple[TracedStep, str]] = {}
    for step, reason in reasons:
        picks.setdefault(step.step, (step, reason))
    return list(picks.values())


def condense(records: Sequence[Metrics], limit: int) -> list[Metrics]:
    """At most `limit` records: each the mean of equally many steps, but the sum of counts by age, the largest of
    maxima, and the last of what counts up."""
    size = -(-len(records) // limit)
    if size <= 1:
        return list(records)
    return [_merge(records[start : start + size]) for start in range(0, len(records), size)]


def _merge(records: Sequence[Metrics]) -> Metrics:
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if record.get(name) is not None]
        if not values:
            continue
        if isinstance(values[0], list):
            length = max(map(len, values))
            merged[name] = np.sum([value + [0] * (length - len(value)) for value in values], axis=0).tolist()
        elif name in LAST_VALUE or not _is_number(values[0]):
            merged[name] = values[-1]
        else:
            merged[name] = max(values) if name.endswith("_max") else float(np.mean(values))
    return merged


def _traced_steps(path: Path) -> list[TracedStep]:
    if not path.exists():
        return []
    steps = []
    for offset, _, record in scan(path):
        spans = record["spans"]
        steps.append(
            TracedStep(
                record["step"],
                offset,
                np.array(record["lengths"], dtype=np.int64),
                np.array(record["truncated"], dtype=bool),
                sum(span["outcome"] == "interrupted" for span in spans),
                sum(span["resumed"] for span in spans),
                trace.duration(trace.StepTrace(**record)),  # type: ignore[typeddict-item]
            )
        )
    return steps


def _load(directory: Path, step: TracedStep) -> trace.StepTrace:
    with (directory / trace.FILE_NAME).open("rb") as file:
        file.seek(step.offset)
        record: trace.StepTrace = json.loads(file.readline())
        return record


def _axis(records: Sequence[Metrics]) -> Axis:
    return Axis([record["step"] for record in records], "step", _heads(records))


def _heads(records: Sequence[Metrics]) -> list[str]:
    return [
        f"step {record['step']}" + (f" at {clock(record['seconds'])}" if record.get("seconds") is not None else "")
        for record in records
    ]


def _values(records: Sequence[Metrics], name: str) -> list[Value]:
    values = (record.get(name) for record in records)
    return [float(value) if value is not None and _is_number(value) else None for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _trailing_mean(values: Sequence[Value], window: int) -> list[Value]:
    if window < 2:
        return list(values)
    smooth: list[Value] = []
    for index, value in enumerate(values):
        recent = [v for v in values[max(0, index - window + 1) : index + 1] if v is not None]
        smooth.append(float(np.mean(recent)) if value is not None else None)
    return smooth


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return flat


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _measured(records: Sequence[Metrics], name: str) -> list[float]:
    return [value for value in _values(records, name) if value is not None]


def _total(records: Sequence[Metrics], name: str) -> Value:
    return sum(values) if (values := _measured(records, name)) else None


def _mean(records: Sequence[Metrics], name: str) -> Value:
    return float(np.mean(values)) if (values := _measured(records, name)) else None


def _largest(records: Sequence[Metrics], name: str) -> Value:
    return max(_measured(records, name), default=None)


def _weighted(records: Sequence[Metrics], name: str, weight: str) -> Value:
    pairs = [
        (record[name], record[weight]) for record in records if _is_number(record.get(name)) and record.get(weight)
    ]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def _show(value: Any, form: Any = compact) -> str:
    return "–" if value is None else str(form(value))


def _arrow(before: Any, after: Any) -> str:
    if before is None and after is None:
        return "not evaluated"
    return f"{_show(before, lambda v: f'{v:.2f}')} → {_show(after, lambda v: f'{v:.2f}')}"
