"""Timeline of one step's samples as inline SVG: decoding, waiting, interruption, resumption and engine occupancy.

Each row is a sample. Rows are sorted by the time at which samples got a slot, so a full engine shows as a staircase
whose steps are slots that become free. With overlapped training, generation and training have a lane each above the
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from april.reporting.charts import LEFT, RIGHT, Scale, clock_ticks, ticks
from april.reporting.trace import SpanRecord, StepTrace, decoding_start, duration, load

WIDTH = 1112
LOAD_HEIGHT = 56
ROWS_TOP = LOAD_HEIGHT + 26
LANE_HEIGHT = 24
ROWS_HEIGHT = 560
AXIS_HEIGHT = 40

LEGEND = (
    ("c-blue", "finished"),
    ("c-green", "resumed and finished"),
    ("c-amber", "interrupted (a green start: had been resumed)"),
    ("c-wait", "waiting for a slot"),
)
AWAY = ("c-purple", "waiting for its environment")
LANES = (("c-load", "generation"), ("c-grey", "training"), ("c-red", "weight update"))


def timeline(record: StepTrace) -> str:
    """The step as SVG, with a tooltip on every bar. Bars of one group carry its id in `data-g`."""
    spans = record["spans"]
    rows = _rows(spans)
    end = duration(record) or 1.0
    pitch = min(9.0, max(1.4, ROWS_HEIGHT / max(1, len(rows))))
    resumed_at = record.get("resumed_at")
    top = ROWS_TOP + (0 if resumed_at is None else 2 * LANE_HEIGHT + 8)
    floor = top + pitch * len(rows) + 4
    height = round(floor + AXIS_HEIGHT)
    # A little room on the right keeps the line where the step was satisfied off the edge.
    x = Scale(0.0, 1.012 * end, LEFT, WIDTH - RIGHT)
    body = [_axis(x, floor, height), _engine(record, x)]
    thick = pitch * (0.78 if pitch > 3 else 0.9)
    for row, sample in enumerate(rows):
        body += _away(sample, x, top + row * pitch + thick / 2)
        body += [_bar(span, x, top + row * pitch, thick) for span in sample]
    if record["interrupt_at"] is not None and resumed_at is not None:
        body += _lanes(record, x, record["interrupt_at"], resumed_at)
    elif record["interrupt_at"] is not None:
        at = x(record["interrupt_at"])
        body.append(f'<path class="satisfied" d="M{at},{ROWS_TOP - 10}V{floor}"/>')
        text = f"step satisfied at {record['interrupt_at']:.3g} s"
        body.append(f'<text class="note" x="{at - 5}" y="{ROWS_TOP - 3}" text-anchor="end">{text}</text>')
    label = f"Timeline of the {len(rows)} samples of step {record['step']}"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(body)}</svg>'


def _lanes(record: StepTrace, x: Scale, interrupted_at: float, resumed_at: float) -> list[str]:
    """Draw one lane for generation and one for training.

    Training on the previous step ends with the weight update, for which generation stops; then the trainer waits until
    the step is complete.
    """
    generation, training, update = (style for style, _ in LANES)
    drawn = [_stretch(x, 0, generation, *busy, "generation") for busy in _busy(record["spans"])]
    drawn.append(_stretch(x, 1, training, 0.0, interrupted_at, "training on the step before"))
    drawn += [_stretch(x, lane, update, interrupted_at, resumed_at, "weight update") for lane in (0, 1)]
    names = (
        f'<text class="note" x="{x(0) + 6:g}" y="{ROWS_TOP + (lane + 0.5) * LANE_HEIGHT + 4:g}">{name}</text>'
        for lane, name in enumerate(("generation", "training"))
    )
    return [*drawn, *names]


def _busy(spans: Sequence[SpanRecord]) -> list[tuple[float, float]]:
    """The stretches of time in which something decodes."""
    stretches: list[tuple[float, float]] = []
    began = None
    for time, decoding, _ in load(spans):
        if decoding and began is None:
            began = time
        elif not decoding and began is not None:
            stretches.append((began, time))
            began = None
    return stretches


def _stretch(x: Scale, lane: int, style: str, since: float, until: float, what: str) -> str:
    place = f'x="{x(since):g}" y="{ROWS_TOP + lane * LANE_HEIGHT}" width="{max(1.0, x(until) - x(since)):.1f}"'
    title = f"<title>{what}, {since:.2f} to {until:.2f} s</title>"
    return f'<rect class="{style}" {place} height="{LANE_HEIGHT - 4}">{title}</rect>'


def _rows(spans: Sequence[SpanRecord]) -> list[list[SpanRecord]]:
    rows: dict[str, list[SpanRecord]] = {}

    first_free = min((span["end"] for span in spans if span["queued"] is not None), default=0.0)

    def order(span: SpanRecord) -> tuple[bool, float, bool, float]:
        # What ran before any slot became free started together, whatever prefill took: resumed samples, then new.
        start = decoding_start(span)
        return span["queued"] is None, start if start >= first_free else -1.0, not span["resumed"], span["end"]

    for span in sorted(spans, key=order):
        # A sample with several spans, such as turns, has one row at the place of its first span.
        rows.setdefault(span["sample"], []).append(span)
    return list(rows.values())


def _away(sample: Sequence[SpanRecord], x: Scale, middle: float) -> list[str]:
    """A line for each time in which the sample awaited its environment, up to its next turn, or the step's end."""
    begins = sorted(span["start"] for span in sample)
    lines = []
    for span in (span for span in sample if span["outcome"] == "turn"):
        until = next((start for start in begins if start >= span["end"]), x.high / 1.012)
        shape = f"M{x(span['end']):g},{middle:.1f}H{x(until):g}"
        lines.append(f'<path class="away" d="{shape}"><title>sample {span["sample"]}: its environment</title></path>')
    return lines


def _bar(span: SpanRecord, x: Scale, top: float, thick: float) -> str:
    start, end = x(decoding_start(span)), x(span["end"])
    parts = []
    queued_from = x(span["start"])
    if start - queued_from >= 0.5:
        middle = top + thick / 2
        parts.append(f'<path class="wait" d="M{queued_from:g},{middle:.1f}H{start:g}"/>')
    if span["queued"] is not None:
        interrupted = span["outcome"] == "interrupted"
        style = "c-amber" if interrupted else "c-green" if span["resumed"] else "c-blue"
        width = max(0.8, end - start)
        shape = f'y="{top:.1f}" height="{thick:.1f}"'
        parts.append(f'<rect class="{style}" x="{start:g}" {shape} width="{width:.1f}"/>')
        if interrupted and span["resumed"]:
            parts.append(f'<rect class="c-green" x="{start:g}" {shape} width="{min(6.0, width / 2):.1f}"/>')
    return f'<g data-g="{int(span["group"])}"><title>{escape(_describe(span))}</title>{"".join(parts)}</g>'


def _describe(span: SpanRecord) -> str:
    if span["queued"] is None:
        return f"sample {span['sample']}: never got a slot"
    origin = "resumed, " if span["resumed"] else ""
    waited = f", after {span['queued']:.2f} s in the queue" if span["queued"] >= 0.01 else ""
    tokens = f"tokens {span['before']:,} to {span['after']:,}"
    return f"sample {span['sample']}: {origin}{span['outcome']} at {span['end']:.2f} s{waited}; {tokens}"


def _engine(record: StepTrace, x: Scale) -> str:
    """Samples decoding over time, above the rows, against the engine's slots."""
    points = load(record["spans"])
    most = max([record["slots"], *(decoding for _, decoding, _ in points)], default=1) or 1
    y = Scale(0, most, LOAD_HEIGHT, 8)
    path = f"M{x(0)},{y(0)}" + "".join(f"H{x(time):g}V{y(decoding):g}" for time, decoding, _ in points) + "Z"
    slots = y(record["slots"])
    return (
        f'<path class="area c-load" d="{path}"/><path class="grid" d="M{LEFT},{slots}H{WIDTH - RIGHT}"/>'
        f'<path class="base" d="M{LEFT},{y(0)}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 8}" y="{slots + 3.5:.1f}" text-anchor="end">{record["slots"]}</text>'
        f'<text x="{LEFT - 8}" y="{y(0) + 3.5:.1f}" text-anchor="end">0</text>'
        f'<text class="note" x="{LEFT + 6}" y="{slots + 14:.1f}">slots decoding</text>'
    )


def _axis(x: Scale, floor: float, height: int) -> str:
    marks = clock_ticks(0, x.high, 8) if x.high >= 4 else ticks(0, x.high, 8)
    stubs = "".join(f"M{x(tick)},{floor:.1f}v4" for tick in marks)
    grid = "".join(f"M{x(tick)},{ROWS_TOP}V{floor:.1f}" for tick in marks)
    names = "".join(f'<text x="{x(tick)}" y="{floor + 17:.1f}" text-anchor="middle">{tick:g}</text>' for tick in marks)
    title = "seconds since the step began"
    return (
        f'<path class="grid" d="{grid}"/><path class="base" d="M{LEFT},{floor:.1f}H{WIDTH - RIGHT}{stubs}"/>{names}'
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 6}" text-anchor="middle">{title}</text>'
    )
