from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from april.config.recipe import Recipe
from april.simulation.page import print_points, simulation_page
from april.simulation.plan import BASELINE, Point, advice, kept_caches, recommended
from april.simulation.price import price

POINT = Point(
    name="N' = 12,288",
    over_sampling_batch_size=12_288,
    synchronous=False,
    automatic=False,
    overlapping=False,
    overall_tokens_per_second=8_765_432.1,
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
    prefill_share=0.01,
    resumed_prefill_share=0.0,
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


def test_lines_join_only_points_of_one_kind() -> None:
    fixed = [replace(POINT, mean_staleness=stale) for stale in (0.0, 1.0, 2.0)]
    automatic = replace(POINT, automatic=True, mean_staleness=1.5)
    page = simulation_page("a", "b", [SYNCHRONOUS, *fixed, automatic], POINT, "", "")
    for title in ("occupancy", "peak_kv"):
        chart = page.split(f'aria-label="{title}')[1].split("</svg>")[0]
        assert len(chart.split('class="line')) - 1 == 2, "a line of the fixed N', and one of the automatic choice"


def test_a_table_of_large_figures_fits_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_points([POINT], POINT, console)
    heads, _, figures = (line.rstrip() for line in console.file.getvalue().splitlines())
    assert heads.split() == ["consumed/s", "generated/s", "step", "slots", "stale", "KV", "cost", "worth"]
    assert figures.split("  ")[0] == "N' = 12,288"
    for figure in ("9,876,543", "1,234 s", "0.0%", "3.46", "100%", "1,234", "4.93M"):
        assert figure in figures


def test_rates_cover_the_whole_time_if_some_settings_overlap() -> None:
    beside = replace(POINT, name="N' = 12,288, overlap", overlapping=True, overall_tokens_per_second=9_876_543.2)
    console = Console(file=io.StringIO(), width=80)
    print_points([POINT, beside], beside, console)
    heads, _, *figures = (line.rstrip() for line in console.file.getvalue().splitlines())
    assert heads.split() == ["overall/s", "step", "slots", "stale", "KV", "cost", "worth"]
    assert "8,765,432" in figures[0]
    assert "9,876,543" in figures[1]
    assert max(map(len, figures)) <= 80
    page = simulation_page("a", "b", [SYNCHRONOUS, POINT, beside], beside, "", "")
    assert "overlap with training" in page
    assert "+13% to synchronous" in page
    assert "overlap with training" not in simulation_page("a", "b", [SYNCHRONOUS, POINT], POINT, "", "")


def test_the_smallest_over_sampling_with_a_good_overall_rate_is_recommended() -> None:
    def point(name: str, target: int, overall: float, overlapping: bool) -> Point:
        return replace(
            POINT,
            name=name,
            over_sampling_batch_size=target,
            overlapping=overlapping,
            overall_tokens_per_second=overall,
        )

    turns, small, large = point("a", 32, 100.0, False), point("b", 48, 199.0, True), point("c", 64, 200.0, True)
    slow = replace(SYNCHRONOUS, overall_tokens_per_second=50.0)
    assert recommended([slow, turns, small, large]) is small


def test_a_staler_setting_is_recommended_only_if_its_rate_pays_for_more_steps() -> None:
    """As where 6 N came out on top: 4 % more tokens per second for five times the staleness."""

    def point(name: str, rate: float, staleness: float) -> Point:
        return replace(
            POINT,
            name=name,
            consumed_tokens_per_second=rate,
            generated_tokens_per_second=rate,
            mean_staleness=staleness,
        )

    synchronous = replace(point("synchronous", 100.0, 0.0), synchronous=True)
    near, far = point("N' = 48", 192.0, 0.87), point("N' = 192", 200.0, 4.07)
    assert recommended([synchronous, near, far]) is near
    assert recommended([synchronous, point("N' = 48", 120.0, 0.87)]) is synchronous, "a quarter more steps cost more"
    assert "by about 0.014, after" in price(0.868)
    assert "more than 0.026" in price(4.07)
    assert price(0.0) == ""


def test_slots_that_limit_a_setting_are_named() -> None:
    full = replace(POINT, name="N' = 128", occupancy=0.98, peak_kv=0.3)
    sentence = advice([replace(SYNCHRONOUS, occupancy=0.5), full], full, slots=16)
    assert sentence.startswith("Slots limit you: with N' = 128, 98% of an engine's 16 slots decode")
    assert "Raise engine.max_num_seqs, to about 48." in sentence
    assert advice([full, replace(full, peak_kv=0.95)], full, slots=16).startswith("Slots limit you")
    assert advice([replace(full, peak_kv=0.95)], full, slots=16) == "", "the KV cache limits it"


def test_a_kept_kv_cache_is_advised_where_much_is_prefilled_again() -> None:
    recipe, much = Recipe(), replace(POINT, name="N' = 128", prefill_share=0.09, resumed_prefill_share=0.07)
    assert kept_caches(recipe, much) == (
        "With N' = 128, prefill of resumed responses takes 7% of the engines' time: "
        'engine.on_update = "keep" would save about 70.0 s of a rollout of 1,000.0 s, and later tokens then attend to '
        "keys and values of older policies."
    )
    assert kept_caches(recipe, replace(much, resumed_prefill_share=0.04)) == "", "prompts are not saved"


def test_the_baseline_of_a_split_is_synchronous_on_all_gpus() -> None:
    everywhere = replace(SYNCHRONOUS, name=BASELINE, overall_tokens_per_second=9e6)
    page = simulation_page("a", "b", [everywhere, SYNCHRONOUS, POINT], POINT, "", "")
    assert "-3% to synchronous, all GPUs" in page
    assert "Tokens/s over everything" in page, "rates over rollouts do not show what training on fewer GPUs costs"
