from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from april.simulation.page import print_points, simulation_page
from april.simulation.plan import Point

POINT = Point(
    name="N' = 12,288",
    over_sampling_batch_size=12_288,
    synchronous=False,
    automatic=False,
    consumed_tokens_per_second=9_876_543.2,
    generated_tokens_per_second=9_876_543.2,
    step_seconds=1234.5,
    rollout_seconds=1000.0,
    occupancy=0.000349,
    mean_staleness=3.456,
    p99_staleness=12.0,
    max_staleness=12,
    off_policy_token_share=0.5,
    peak_kv=1.0,
    preemptions=0,
    cost_per_million_tokens=1234.5,
)
SYNCHRONOUS = replace(POINT, name="synchronous", synchronous=True)


def test_the_frontier_is_drawn_for_a_phone_too() -> None:
    page = simulation_page(
        "a", "b", [SYNCHRONOUS, replace(POINT, mean_staleness=0.0), replace(POINT, mean_staleness=1.0)], POINT, "", ""
    )
    wide, narrow = page.split('<div class="narrow">')
    assert 'viewBox="0 0 1112' in wide
    assert 'viewBox="0 0 540' in narrow
    assert ">0.5</text>" in wide, "staleness is no whole number"


def test_a_table_of_large_figures_fits_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_points([POINT], POINT, console)
    heads, _, figures = (line.rstrip() for line in console.file.getvalue().splitlines())
    assert heads.split() == ["consumed/s", "generated/s", "step", "slots", "stale", "p99", "KV", "cost"]
    assert figures.split("  ")[0] == "N' = 12,288"
    for figure in ("9,876,543", "1,234 s", "0.0%", "3.46", " 12 ", "100.0%", "1,234"):
        assert figure in figures
