"""Results of a simulation, as a table on the terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from april.reporting.charts import HALF, WIDE, Axis, Series, line_chart
from april.reporting.formats import compact, percent, seconds
from april.reporting.html import Section, Tile, both_widths, page, row
from april.simulation.plan import Point, over_everything, rate_of
from april.simulation.price import MORE_STEPS, worth

COLUMNS: dict[str, Callable[[Point], str]] = {
    "overall/s": lambda p: f"{p.overall_tokens_per_second:,.0f}",
    "consumed/s": lambda p: f"{p.consumed_tokens_per_second:,.0f}",
    "generated/s": lambda p: f"{p.generated_tokens_per_second:,.0f}",
    "step": lambda p: seconds(p.step_seconds),
    "slots": lambda p: f"{p.occupancy:.1%}",
    "stale": lambda p: f"{p.mean_staleness:.2f}",
    "KV": lambda p: f"{p.peak_kv:.0%}",
    "cost": lambda p: "" if p.cost_per_million_tokens is None else compact(p.cost_per_million_tokens),
}
"""Columns of the table. The cost is shown only if GPUs have a price. If some settings overlap, the overall rate is
shown, otherwise the rates of the rollout phase."""
FRONTIER = (
    "Every point is one N'. To the right, more groups are in flight: engines are fuller, data is older. The automatic "
    "choice learns the lengths during the run, and takes the smallest N' that costs little throughput."
)
PRICED = "; cost of a million consumed tokens, training included"


def about_rates(points: Sequence[Point]) -> str:
    """Return a description of the rates in the table, and of the cost if there is one."""
    everything = over_everything(points)
    rates = "Tokens trained on per second, over everything" if everything else "Tokens per second of rollout"
    return f"{rates}; worth is that rate divided by 1 + {MORE_STEPS:g} for each update of mean staleness" + (
        PRICED if any(point.cost_per_million_tokens is not None for point in points) else ""
    )


def print_points(points: Sequence[Point], chosen: Point, console: Console | None = None) -> None:
    """Print a line for each setting, at most 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    columns = _columns(points, chosen)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for point in points:
        cells = [cell(point) for cell in columns.values()]
        table.add_row(point.name, *cells, style="bold green" if point is chosen else "")
    (console or Console()).print(table)


def simulation_page(
    title: str, subtitle: str, points: Sequence[Point], chosen: Point, hint: str, assumptions: str
) -> str:
    """Return the page: the frontier of throughput against staleness, related charts, and every figure.

    Args:
        points: all settings, synchronous first.
        chosen: recommended setting.
        hint: advice to the user; "" for none.
        assumptions: assumptions of the figures, in sentences.
    """
    partial = _partial(points)
    rate = rate_of(points)
    gain = rate(chosen) / rate(points[0]) - 1
    tiles = [
        Tile("Recommended", chosen.name, "the least stale within 3 % of the best"),
        Tile(_rate_name(points).capitalize(), compact(rate(chosen)), f"{gain:+.0%} to {points[0].name}"),
        Tile("Mean staleness", f"{chosen.mean_staleness:.2f}", f"{chosen.max_staleness} updates at most"),
        _last_tile(chosen),
    ]
    stale = _by_staleness(partial)
    others = row(
        ("Engine slots that decode", _over(partial, stale, "occupancy")),
        ("KV cache, at most", _over(partial, stale, "peak_kv")),
    )
    return page(
        title,
        subtitle,
        tiles,
        [
            *([Section("Before you trust this", "", hint)] if hint else []),
            Section(
                "Throughput against staleness",
                frontier(points),
                FRONTIER,
            ),
            Section("What fills the engines", others),
            Section(
                "Every figure",
                table_of(points, chosen),
                f"{about_rates(points)}. Also: seconds per step, including training; share of slots that decode; mean "
                "staleness; largest share of its KV cache that an engine used. In bold: "
                f"{chosen.name}, the recommended setting.",
            ),
            Section("What this rests on", "", assumptions),
        ],
        "Written by april simulate. Simulated in virtual time, not measured.",
    )


def frontier(points: Sequence[Point]) -> str:
    """Return the chart of throughput against staleness; the first of `points` is the baseline."""
    partial = _partial(points)
    axis, rate = _by_staleness(partial), rate_of(points)
    rates = [*_by_kind(partial, rate), Series(points[0].name, [rate(points[0])] * len(partial), "c-grey")]
    return both_widths(
        *(
            line_chart(
                f"{_rate_name(points).capitalize()} against mean staleness", axis, rates, y_range=(0, None), size=size
            )
            for size in (WIDE, HALF)
        )
    )


def _partial(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if not point.synchronous]


def _by_kind(partial: Sequence[Point], value: Callable[[Point], float]) -> list[Series]:
    """Return a line for each kind of setting: only points of one kind are joined."""
    kinds = {
        (False, False): ("partial rollouts, N' fixed", "c-blue"),
        (True, False): ("N' chosen automatically", "c-green"),
        (False, True): ("overlap with training, N' fixed", "c-amber"),
        (True, True): ("overlap, N' automatic", "c-purple"),
    }
    present = {(point.automatic, point.overlapping) for point in partial}
    return [
        Series(
            name,
            [value(point) if (point.automatic, point.overlapping) == kind else None for point in partial],
            style,
            dots=True,
        )
        for kind, (name, style) in kinds.items()
        if kind in present
    ]


def _rate_name(points: Sequence[Point]) -> str:
    return "tokens/s over everything" if over_everything(points) else "consumed tokens/s"


def _by_staleness(partial: list[Point]) -> Axis:
    partial.sort(key=lambda point: point.mean_staleness)
    return Axis(
        [point.mean_staleness for point in partial],
        "mean staleness, in weight updates",
        [f"{point.name}: staleness {point.mean_staleness:.2f}" for point in partial],
        whole=False,
    )


def _columns(points: Sequence[Point], chosen: Point) -> dict[str, Callable[[Point], str]]:
    left_out = {"consumed/s", "generated/s"} if over_everything(points) else {"overall/s"}
    if chosen.cost_per_million_tokens is None:
        left_out.add("cost")
    rate = rate_of(points)
    columns = {name: cell for name, cell in COLUMNS.items() if name not in left_out}
    return columns | {"worth": lambda point: compact(worth(rate(point), point.mean_staleness))}


def _last_tile(chosen: Point) -> Tile:
    if chosen.cost_per_million_tokens is None:
        return Tile("A step", seconds(chosen.step_seconds), f"{seconds(chosen.rollout_seconds)} of it rollouts")
    return Tile("Cost of a million tokens", f"{chosen.cost_per_million_tokens:.3g}", "consumed; rollout and training")


def _over(points: Sequence[Point], axis: Axis, name: str) -> str:
    lines = _by_kind(points, lambda point: float(getattr(point, name)))
    return line_chart(name, axis, lines, y_format=percent, legend=False)


def table_of(points: Sequence[Point], chosen: Point) -> str:
    """Return every figure of every setting, the chosen setting in bold."""
    columns = _columns(points, chosen)
    head = "".join(f"<th>{column}</th>" for column in ("", *columns))
    rows = (
        f"<tr class='{'chosen' * (point is chosen)}'><td>{point.name}</td>"
        f"{''.join(f'<td>{cell(point)}</td>' for cell in columns.values())}</tr>"
        for point in points
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
