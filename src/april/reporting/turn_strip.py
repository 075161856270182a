"""Phases of a training step whose engine and trainer use the same devices in turn, as inline SVG: a bar per phase."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from april.reporting.charts import RIGHT, Scale, ticks

WIDTH, LEFT, ROW, AXIS = 1112, 230, 18, 40
STYLES = {"engine": "c-blue", "training": "c-grey"}
"""Colour class by the first word of a phase; others are moves of the trainer."""


def turn_strip(turn: Sequence[tuple[str, float, float]]) -> str:
    """Return the phases as SVG, one row each, by beginning; times are seconds since the rollout ended."""
    end = max(until for _, _, until in turn) or 1.0
    x = Scale(0.0, 1.012 * end, LEFT, WIDTH - RIGHT)
    floor = ROW * len(turn) + 4
    marks = ticks(0, x.high, 8)
    grid = "".join(f"M{x(tick)},0V{floor}" for tick in marks)
    names = "".join(f'<text x="{x(tick)}" y="{floor + 15}" text-anchor="middle">{tick:g}</text>' for tick in marks)
    body = [f'<path class="grid" d="{grid}"/><path class="base" d="M{LEFT},{floor}H{WIDTH - RIGHT}"/>{names}']
    for row, (name, since, until) in enumerate(turn):
        top, width = row * ROW + 3, max(1.0, x(until) - x(since))
        style = STYLES.get(name.partition(" ")[0], "c-amber")
        tooltip = f"<title>{escape(name)}, {since:.2f} to {until:.2f} s</title>"
        body.append(f'<text x="{LEFT - 8}" y="{top + 10}" text-anchor="end">{escape(name)}</text>')
        body.append(
            f'<rect class="{style}" x="{x(since):g}" y="{top}" width="{width:.1f}" height="{ROW - 6}">{tooltip}</rect>'
        )
    middle, title = (LEFT + WIDTH - RIGHT) / 2, "seconds since the rollout ended"
    body.append(f'<text class="axis" x="{middle}" y="{floor + AXIS - 8}" text-anchor="middle">{title}</text>')
    label = "Engine and trainer take turns on the devices"
    return f'<svg viewBox="0 0 {WIDTH} {floor + AXIS}" role="img" aria-label="{label}">{"".join(body)}</svg>'
