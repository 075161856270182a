"""Plots as inline SVG: lines, stacked areas and columns, histograms. Nothing but strings in and out.

Colours are CSS classes (`c-blue`, `c-age2`, …) that the page's style sheet resolves for light, dark and print. The
`data-hover` attribute of a plot holds the values under the pointer as JSON for the page's script; the plot itself shows
the same data without a pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from april.reporting.formats import Format, clock, compact

Value = float | None
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 10, 40
"""Margins of a plot, in pixels at full size."""
HALF, WIDE = (540, 250), (1112, 270)
"""Sizes of a plot: two in a row, or one over the whole page."""
THIRD = (356, 180)


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over the plot's x values; None where it was not measured.

    Args:
        style: the CSS class of its colour.
        dots: mark each measured point.
        faint: draw it as background to another series.
    """

    label: str
    values: Sequence[Value]
    style: str
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to pixels [start, end], linearly or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Return round numbers in [low, high], about `count` of them; only integers if `whole`."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= min((1, 2, 5, 10), key=lambda factor: abs((high - low) / (step * factor) - about))
    if whole:
        step = max(1, round(step))
    # The tolerance keeps a tick at an end that division has moved by a rounding error.
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def clock_ticks(low: float, high: float, about: int = 5) -> list[float]:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = min(steps, key=lambda step: abs((high - low) / step - about))
    return [float(index * step) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis that plots of a section share.

    Args:
        values: one per point.
        heads: headings of the pointer's tooltip, one per point.
        time: values are seconds.
        whole: only whole numbers are marked.
    """

    values: Sequence[float]
    title: str
    heads: Sequence[str]
    time: bool = False
    whole: bool = True

    def scale(self, width: float, pad: float = 0.0) -> Scale:
        values = self.values or [0.0]
        return Scale(min(values) - pad, max(values) + pad, LEFT, width - RIGHT)

    def marks(self, scale: Scale, about: int = 6) -> list[tuple[float, str]]:
        if self.time:
            return [(scale(tick), clock(tick)) for tick in clock_ticks(scale.low, scale.high, about)]
        if not self.whole:
            return [(scale(tick), f"{tick:g}") for tick in ticks(scale.low, scale.high, about)]
        low, high = math.ceil(scale.low), math.floor(scale.high)
        return [(scale(tick), f"{tick:,.0f}") for tick in ticks(low, high, about, whole=True)]


def line_chart(
    label: str,
    axis: Axis,
    series: Sequence[Series],
    *,
    y_format: Format = compact,
    y_range: tuple[Value, Value] = (None, None),
    size: tuple[int, int] = HALF,
    legend: bool = True,
) -> str:
    """Lines over a common x axis.

    Args:
        label: description of the plot for screen readers.
        y_range: fixed ends of the y axis; None leaves an end to the data.
    """
    shown = [s for s in series if any(value is not None for value in s.values)]
    if not shown:
        return missing(label)
    width, height = size
    x = axis.scale(width)
    y = _y_scale([value for s in shown for value in s.values if value is not None], y_range, height)
    body = [_frame(size, axis.marks(x, width // 90), _y_marks(y, y_format), axis.title)]
    for s in shown:
        points = [(x(at), y(value)) for at, value in zip(axis.values, s.values, strict=True) if value is not None]
        faint = " faint" if s.faint else ""
        body.append(f'<path class="line {s.style}{faint}" d="{_path(points)}"/>')
        if s.dots or len(points) == 1:
            body += [f'<circle class="dot {s.style}" cx="{px}" cy="{py}" r="3"/>' for px, py in points]
    return _figure(label, size, body, shown if legend else [], _hover(axis, x, shown, y_format))


def stacked_chart(
    label: str,
    axis: Axis,
    series: Sequence[Series],
    *,
    y_format: Format = compact,
    y_range: tuple[Value, Value] = (0, None),
    size: tuple[int, int] = WIDE,
    columns: bool = False,
    notes: Sequence[Sequence[str]] = (),
) -> str:
    """Series on top of one another, as areas or as columns; None counts as 0.

    Args:
        notes: texts of the pointer's tooltip in place of each series' values.
    """
    if not axis.values or not series:
        return missing(label)
    columns = columns or len(axis.values) < 3
    width, height = size
    count = len(axis.values)
    # A column stands around its x value, so the axis leaves half of one free at both ends.
    gap = (max(axis.values) - min(axis.values)) / (count - 1) if count > 1 else 1.0
    x = axis.scale(width, pad=gap / 2 if columns else 0.0)
    base = np.zeros(count)
    layers = []
    for s in series:
        top = base + np.array([value or 0.0 for value in s.values])
        layers.append((s, base, top))
        base = top
    y = _y_scale([0.0, *base.tolist()], y_range, height)
    body = [_frame(size, axis.marks(x, width // 90), _y_marks(y, y_format), axis.title)]
    bar = max(1.0, 0.86 * (x.end - x.start) / count) if columns else 0.0
    bar = min(bar, 72.0)
    for s, low, high in layers:
        if columns:
            d = "".join(
                f"M{x(at) - bar / 2:.1f},{y(b)}h{bar:.1f}V{y(t)}h{-bar:.1f}Z"
                for at, b, t in zip(axis.values, low, high, strict=True)
                if t > b
            )
        else:
            over = [(x(at), y(t)) for at, t in zip(axis.values, high, strict=True)]
            under = [(x(at), y(b)) for at, b in zip(axis.values, low, strict=True)]
            d = _path([*over, *reversed(under)]) + "Z"
        body.append(f'<path class="area layer {s.style}" d="{d}"/>')
    return _figure(label, size, body, series, _hover(axis, x, series, y_format, notes))


def histogram(
    label: str,
    values: Sequence[int],
    truncated: Sequence[bool],
    *,
    high: float,
    top: float,
    size: tuple[int, int],
    x_title: str = "",
    bins: int = 56,
) -> str:
    """Counts of `values` in equal bins on a logarithmic y axis, with the median, the 99th percentile and the maximum.

    Args:
        truncated: for each value, whether it was cut off; these are drawn once more in front.
        high: end of the x axis, so that several histograms compare.
        top: end of the y axis.
    """
    width, height = size
    edges = np.linspace(0, high, bins + 1)
    counts = np.histogram(values, edges)[0]
    cut = np.histogram(np.asarray(values)[np.asarray(truncated, dtype=bool)], edges)[0]
    # From 0.6, so that a bin of one response has a height on the logarithmic axis.
    x, y = Scale(0, high, LEFT, width - RIGHT), Scale(0.6, top, height - BOTTOM, TOP, log=True)
    powers = [10**n for n in range(math.floor(math.log10(top)) + 1)]
    marks = [(x(tick), compact(tick)) for tick in ticks(0, high, 8, whole=True)]
    body = [_frame(size, marks, [(y(power), compact(power)) for power in powers], x_title)]
    floor, bar = height - BOTTOM, (x.end - x.start) / bins - 1
    for style, heights in (("c-blue", counts), ("c-red", cut)):
        d = "".join(
            f"M{x(edge) + 0.5:.1f},{floor}h{bar:.1f}V{y(n)}h{-bar:.1f}Z"
            for edge, n in zip(edges, heights, strict=False)
            if n
        )
        body.append(f'<path class="area {style}" d="{d}"/>')
    marked = (("p50", np.percentile(values, 50)), ("p99", np.percentile(values, 99)), ("max", max(values)))
    for row, (name, value) in enumerate(marked):
        at, below = x(float(value)), TOP + 12 + 15 * row
        anchor, shift = ("end", -5) if at > 0.8 * width else ("start", 5)
        body.append(f'<path class="marker" d="M{at},{TOP}V{floor}"/>')
        text = f'<text class="note" x="{at + shift:.1f}" y="{below}" text-anchor="{anchor}">{name} {value:,.0f}</text>'
        body.append(text)
    centres = [(a + b) / 2 for a, b in pairwise(edges)]
    heads = [f"{a:,.0f} to {b:,.0f} tokens" for a, b in pairwise(edges)]
    series = [Series("responses", counts.tolist(), "c-blue"), Series("truncated", cut.tolist(), "c-red")]
    return _figure(label, size, body, [], _hover(Axis(centres, "", heads), x, series, lambda n: f"{n:,.0f}"))


def legend_of(series: Sequence[Series]) -> str:
    items = "".join(f'<li><i class="{s.style}"></i>{escape(s.label)}</li>' for s in series if not s.faint)
    return f'<ul class="legend">{items}</ul>'


def missing(label: str) -> str:
    return f'<p class="missing">{escape(label)}: nothing was recorded.</p>'


def _y_scale(values: Sequence[float], fixed: tuple[Value, Value], height: int) -> Scale:
    low, high = min(values), max(values)
    # An axis that nearly reaches zero should reach it; one far from it would hide the change.
    if 0 <= low <= 0.6 * high:
        low = 0.0
    if high <= low:
        low, high = (0.0, 2 * high or 1.0) if high >= 0 else (low - 1, low + 1)
    space = 0.06 * (high - low)
    low = fixed[0] if fixed[0] is not None else (low if low == 0 else low - space)
    high = fixed[1] if fixed[1] is not None else high + space
    return Scale(low, max(high, low + 1e-12), height - BOTTOM, TOP)


def _y_marks(y: Scale, y_format: Format) -> list[tuple[float, str]]:
    values = ticks(y.low, y.high, max(3, int((y.start - y.end) // 42)))
    if y_format is compact and max(map(abs, values)) >= 1e4:
        # One unit for the whole axis: 5k below 10k, not 5,000.
        unit, scale = ("M", 1e6) if max(map(abs, values)) >= 1e6 else ("k", 1e3)
        return [(y(value), f"{value / scale:g}{unit}" if value else "0") for value in values]
    return [(y(value), y_format(value)) for value in values]


def _frame(
    size: tuple[int, int], x_marks: Sequence[tuple[float, str]], y_marks: Sequence[tuple[float, str]], x_title: str
) -> str:
    width, height = size
    floor = height - BOTTOM
    lines = "".join(f"M{LEFT},{at}H{width - RIGHT}" for at, _ in y_marks)
    stubs = "".join(f"M{at},{floor}v4" for at, _ in x_marks)
    left = "".join(f'<text x="{LEFT - 8}" y="{at + 3.5:.1f}" text-anchor="end">{text}</text>' for at, text in y_marks)
    under = "".join(f'<text x="{at}" y="{floor + 17}" text-anchor="middle">{text}</text>' for at, text in x_marks)
    middle = (LEFT + width - RIGHT) / 2
    title = f'<text class="axis" x="{middle}" y="{height - 6}" text-anchor="middle">{escape(x_title)}</text>'
    return f'<path class="grid" d="{lines}"/><path class="base" d="M{LEFT},{floor}H{width - RIGHT}{stubs}"/>' + (
        left + under + title
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def _hover(
    axis: Axis, x: Scale, series: Sequence[Series], y_format: Format, notes: Sequence[Sequence[str]] = ()
) -> str:
    shown = [s for s in series if not s.faint]
    texts = notes or [["" if value is None else y_format(value) for value in s.values] for s in shown]
    content = {
        "x": [x(value) for value in axis.values],
        "heads": list(axis.heads),
        "series": [[s.label, s.style] for s in shown],
        "values": [list(text) for text in texts],
    }
    return escape(json.dumps(content, separators=(",", ":"), ensure_ascii=False))


def _figure(label: str, size: tuple[int, int], body: Sequence[str], legend: Sequence[Series], hover: str) -> str:
    width, height = size
    names = legend_of(legend) if legend else ""
    wide = " wide" if width > WIDE[0] / 2 + LEFT else ""
    return (
        f'<figure class="plot{wide}">{names}<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"'
        f' data-floor="{height - BOTTOM}" data-hover="{hover}">{"".join(body)}</svg></figure>'
    )
