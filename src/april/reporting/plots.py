"""The plots of a run's report, a section each."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from april.reporting.charts import (
    HALF,
    THIRD,
    WIDE,
    Axis,
    Series,
    Value,
    histogram,
    legend_of,
    line_chart,
    missing,
    stacked_chart,
)
from april.reporting.formats import clock, compact, hundredths, percent, seconds
from april.reporting.formats import size as size_of
from april.reporting.html import Section, both_widths, folded, row
from april.reporting.metrics import METRICS
from april.reporting.run import Metrics, Run, TracedStep, condense, measured, values
from april.reporting.timeline import AWAY, LANES, LEGEND, timeline
from april.reporting.turn_strip import turn_strip

MAX_POINTS = 400
"""Points along a plot's x axis; a longer run is drawn with several steps to a point."""
MAX_COLUMNS = 120
AGES = 6
"""Policy ages shown apart; the last one stands for itself and all older."""

OPTIMISED = (
    "loss",
    "grad_norm",
    "entropy",
    "kl_behaviour",
    "ess",
    "clip_fraction",
    "ratio_max",
    "response_length_mean",
    "truncated_share",
    "lr",
)


def plots_of(run: Run) -> list[Section]:
    """Return the sections of plots in reading order."""
    return [
        _learning(run),
        _lengths(run),
        _timeline(run),
        _ages(run),
        _throughput(run),
        _staleness(run),
        _admission(run),
        _phases(run),
        _engines(run),
        _optimisation(run),
    ]


def _learning(run: Run) -> Section:
    records = condense(run.metrics, MAX_POINTS)
    rewards = values(records, "reward")
    smooth = _trailing_mean(rewards, len(records) // 12)
    series = [
        Series("reward, each step", rewards, "c-blue", faint=True),
        Series("reward" if smooth == rewards else "reward (trailing mean)", smooth, "c-blue"),
        Series(METRICS["eval_reward"].label, values(records, "eval_reward"), "c-amber", dots=True),
    ]
    label = "Reward and held-out reward"
    parts = [("over steps", line_chart(label, _axis(records), series))]
    if all("seconds" in record for record in records):
        by_time = Axis([r["seconds"] for r in records], "wall clock", _heads(records), time=True)
        parts.append(("over wall-clock time", line_chart(label, by_time, series)))
    if run.evaluations("accuracy") and run.evaluations("accuracy") != run.evaluations("eval_reward"):
        accuracy = [Series(METRICS["accuracy"].label, values(records, "accuracy"), "c-green", dots=True)]
        parts.append(("held-out accuracy", line_chart("Held-out accuracy", _axis(records), accuracy, y_range=(0, 1))))
    return Section(
        "Reward",
        row(*parts),
        "The reward is what the policy earned on the prompts it trained on, the held-out reward what it earns on "
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
        plot = both_widths(
            *(
                histogram(
                    f"Response lengths, {title}",
                    lengths.tolist(),
                    truncated.tolist(),
                    high=high,
                    top=top,
                    size=(width, 210),
                    x_title="response length in tokens" if end is ends[-1] else "",
                    bins=bins,
                )
                for width, bins in ((WIDE[0], 56), (HALF[0], 28))
            )
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


IN_TURN = (
    "At the line the step had its groups: what was still decoding was interrupted with all its tokens kept, and goes "
    "on in the next step."
)
BESIDE = (
    "Generation goes on beside training, a lane each: it stops for the weight update alone, with all tokens kept, and "
    "the step ends as soon as it has its groups."
)


def _timeline(run: Run) -> Section:
    picks = pick_steps(run.traced)
    if not picks:
        return Section("One step, sample by sample", missing("Timeline"))
    options, parts, episodes, overlaps = [], [], False, False
    for index, (step, reason) in enumerate(picks):
        facts = f"{step.interrupted} interrupted, {step.resumed} resumed"
        options.append(f'<option value="{step.step}">step {step.step}, {reason}: {facts}</option>')
        record = run.load(step)
        episodes |= any(span["outcome"] == "turn" for span in record["spans"])
        overlaps |= record.get("resumed_at") is not None
        drawing = timeline(record)
        if turn := record.get("turn"):
            drawing += turn_strip(turn)
        hidden = " hidden" if index else ""
        parts.append(
            f'<div class="timeline" data-step="{step.step}"{hidden}><div class="plot wide">{drawing}</div></div>'
        )
    legend = legend_of(
        [
            Series(name, [], style)
            for style, name in (*LEGEND, *([AWAY] if episodes else ()), *(LANES if overlaps else ()))
        ]
    )
    select = f'<select id="pick" aria-label="step to show">{"".join(options)}</select>'
    return Section(
        "One step, sample by sample",
        f'<div class="steps">{legend}{select}</div>{"".join(parts)}',
        "Each bar is a sample while it had a slot, in the order in which samples got one, and the strip above counts "
        f"the slots at work. {BESIDE if overlaps else IN_TURN} Point at a bar to see its group.",
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
    label, axis = "Share of tokens trained on, by policy age", _axis(records)
    chart = both_widths(
        *(
            stacked_chart(label, axis, series, y_format=percent, y_range=(0, 1), size=size, notes=notes)
            for size in (WIDE, HALF)
        )
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
        Series("generated", values(records, "generated_tokens_per_second"), "c-grey"),
        Series("consumed", values(records, "consumed_tokens_per_second"), "c-blue"),
    ]
    occupancy = [Series("slots decoding", values(records, "engine_occupancy"), "c-green")]
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
        Series("maximum", values(records, "staleness_max"), "c-purple"),
        Series("mean", values(records, "staleness_mean"), "c-blue"),
    ]
    samples = [
        Series("interrupted", values(records, "samples_interrupted"), "c-amber"),
        Series("resumed", values(records, "samples_resumed"), "c-green"),
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
    if not measured(records, "expected_consumed_tokens_per_second"):
        return Section("", "")
    axis = _axis(records)
    target = [Series("groups under way", values(records, "over_sampling_batch_size"), "c-blue")]
    speeds = [
        Series("got", values(records, "consumed_tokens_per_second"), "c-blue"),
        Series("expected in the long run", values(records, "expected_consumed_tokens_per_second"), "c-amber"),
    ]
    lengths = [
        Series("trained on", values(records, "response_length_mean"), "c-blue"),
        Series("of the task, unfinished ones counted", values(records, "response_length_expected"), "c-amber"),
    ]
    last = next((r["admission_reason"] for r in reversed(run.steps) if r.get("admission_reason")), "")
    return Section(
        "Admission and lengths",
        row(
            ("groups under way (N')", line_chart("Groups under way", axis, target, y_range=(0, None))),
            ("consumed tokens per second", line_chart("Expected and got", axis, speeds, y_range=(0, None))),
            ("mean response length, in tokens", line_chart("Mean length", axis, lengths, y_range=(0, None))),
        )
        + f"<p>{escape(f'Last decision: {last}.')}</p>"
        + _choices(run),
        "How many groups were kept under way, what that was expected to bring and what it brought. The last plot shows "
        "whether training sees the answers that the task has: the first steps lack the long ones, which are still "
        "unfinished; after that the two lines run together if nothing is biased against long answers.",
    )


def _choices(run: Run) -> str:
    """Plot the forecast for each N' at the last decision."""
    choices = run.load(run.traced[-1]).get("choices") if run.traced else None
    if not choices:
        return ""
    taken = run.steps[-1].get("over_sampling_batch_size")
    rows = "".join(
        f"<tr{' class=chosen' * (target == taken)}><td>{target:,.0f}</td><td>{compact(rate)}</td>"
        f"<td>{hundredths(stale)}</td></tr>"
        for target, rate, stale in choices
    )
    head = "<tr><th>N'</th><th>expected consumed tokens/s</th><th>expected mean staleness</th></tr>"
    return folded("What was expected of each N'", f'<div class="scroll"><table>{head}{rows}</table></div>')


PHASES_IN_TURN = (
    "Rollout is the part that active partial rollouts shorten; training and evaluation cost the same with them or "
    "without."
)
PHASES_BESIDE = (
    "Generation goes on beside training, which is drawn whole: rollout is the time in which the trainer waited for it."
)


def _phases(run: Run) -> Section:
    records = condense(run.steps, MAX_COLUMNS)
    overlaps = bool(measured(records, "overlap_seconds"))
    if overlaps:  # training, and the part of the rollout that did not overlap with it
        records = [{**record, "rollout_seconds": _alone(record)} for record in records]
    styles = {"rollout_seconds": "c-blue", "train_seconds": "c-amber", "eval_seconds": "c-purple"}
    series = [
        Series(METRICS[name].label, values(records, name), style)
        for name, style in styles.items()
        if measured(records, name)
    ]
    return Section(
        "Time per phase",
        both_widths(
            *(
                stacked_chart(
                    "Seconds per step, by phase", _axis(records), series, y_format=seconds, size=size, columns=True
                )
                for size in (WIDE, HALF)
            )
        ),
        f"Where each step's wall-clock time went. {PHASES_BESIDE if overlaps else PHASES_IN_TURN}",
    )


def _alone(record: Metrics) -> float:
    """Return the seconds of the rollout without overlapping training."""
    return float((record.get("rollout_seconds") or 0.0) - (record.get("overlap_seconds") or 0.0))


def _engines(run: Run) -> Section:
    records = condense(run.steps, MAX_POINTS)
    if max(values(records, "engines"), key=lambda count: count or 0, default=0) in (None, 0, 1):
        return Section("", "")
    axis = _axis(records)
    ready = [
        Series("engines", values(records, "engines"), "c-grey"),
        Series("of them ready", values(records, "engines_ready"), "c-blue"),
    ]
    nodes = [Series("where a ready engine works", values(records, "nodes"), "c-purple")]
    updates = [Series("handing the weights over", values(records, "update_seconds"), "c-amber")]
    parts = [
        ("engines", line_chart("Engines", axis, ready, y_range=(0, None))),
        ("nodes", line_chart("Nodes", axis, nodes, y_range=(0, None))),
        ("seconds of each update", line_chart("Update", axis, updates, y_format=seconds, y_range=(0, None))),
    ]
    if measured(records, "update_bytes"):
        moved = [Series("of each update", values(records, "update_bytes"), "c-green")]
        parts.append(("bytes", line_chart("Bytes of an update", axis, moved, y_format=size_of, y_range=(0, None))))
    lost = sum(count or 0 for count in values(run.steps, "engines_lost"))
    return Section(
        "Engines and weight updates",
        row(*parts),
        f"Losses of engines in this run: {lost:,.0f}; their samples went on elsewhere, from their last tokens. "
        "Seconds count from the end of training until engines go on with the new weights; bytes are what each node, "
        "or each server, is handed.",
    )


def _optimisation(run: Run) -> Section:
    records = condense(run.steps, MAX_POINTS)
    axis = _axis(records)
    parts = []
    for name in OPTIMISED:
        if measured(records, name):
            label, form = METRICS[name].label, METRICS[name].form
            series = [Series(label, values(records, name), "c-blue")]
            parts.append((label, line_chart(label, axis, series, y_format=form, size=THIRD, legend=False)))
    if not parts:
        return Section("", "")
    return Section(
        "Optimisation",
        row(*parts, thirds=True),
        "What the optimiser saw. A healthy run keeps the gradient norm and the KL to the policy that sampled the "
        "tokens small, and loses entropy slowly.",
    )


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


def _axis(records: Sequence[Metrics]) -> Axis:
    return Axis([record["step"] for record in records], "step", _heads(records))


def _heads(records: Sequence[Metrics]) -> list[str]:
    return [
        f"step {record['step']}" + (f" at {clock(record['seconds'])}" if record.get("seconds") is not None else "")
        for record in records
    ]


def _trailing_mean(values: Sequence[Value], window: int) -> list[Value]:
    if window < 2:
        return list(values)
    smooth: list[Value] = []
    for index, value in enumerate(values):
        recent = [v for v in values[max(0, index - window + 1) : index + 1] if v is not None]
        smooth.append(float(np.mean(recent)) if value is not None else None)
    return smooth
