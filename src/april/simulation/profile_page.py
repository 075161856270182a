"""Results of a profile, on the terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from april.reporting.charts import HALF, WIDE, Series, histogram, legend_of
from april.reporting.formats import compact, percent, seconds
from april.reporting.html import Section, Tile, both_widths, page
from april.simulation.page import FRONTIER, frontier, table_of
from april.simulation.plan import cut_off
from april.simulation.profile import LAST, Profile
from april.simulation.turns import Turns

BINS, BAR = 12, 44
"""Rows of the histogram on a terminal, and characters of its longest bar."""
OFF = 0.2
"""Relative error of the simulator above which a warning is shown."""


def lines_of(profile: Profile) -> Iterator[str]:
    """Yield the lengths as a histogram, and the tail of a synchronous step; at most 80 columns wide."""
    yield lengths_of(profile)
    lengths = profile.lengths
    counts, edges = np.histogram(lengths, bins=BINS, range=(0, lengths.max()))
    width = len(f"{lengths.max():,}")
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * int(np.ceil(BAR * count / counts.max()))
        yield f"  {int(low) + 1:>{width},} to {int(high):>{width},}  {bar:<{BAR}} {count:,}".rstrip()
    if profile.turns is not None:
        yield turns_of(profile.turns)
    yield tail_of(profile)


def lengths_of(profile: Profile) -> str:
    lengths, cut = profile.lengths, float(profile.truncated.mean())
    p50, p99 = np.percentile(lengths, (50, 99))
    return (
        f"{len(lengths):,} responses: median {p50:,.0f} tokens, mean {lengths.mean():,.0f}, p99 {p99:,.0f}, longest "
        f"{lengths.max():,}; {cut:.0%} cut off. Correlation within groups: {profile.workload.correlation:.2f}."
    )


def turns_of(turns: Turns) -> str:
    return (
        f"Episodes: turns of {turns.tokens:,.0f} tokens on average, answered with {turns.observation_tokens:,} tokens "
        f"in {seconds(turns.seconds)} (sigma {turns.sigma:.1f})."
    )


def tail_of(profile: Profile) -> str:
    tail = profile.tail
    return (
        f"A synchronous step takes {seconds(tail.step_seconds)}, {tail.share:.0%} of it for its last {LAST:.0%} of "
        f"samples, in which {tail.occupancy:.0%} of the slots are at work ({tail.step_occupancy:.0%} over the whole "
        "step)."
    )


def trust_of(profile: Profile) -> str:
    """Return the error of the simulation, and its omissions, as sentences."""
    error = profile.simulation_error
    factor = f"The simulated rate of synchronous rollouts is {1 + error:.2f} times the measured rate"
    care = "; interpret the forecasts with care" if abs(error) > OFF else ""
    training = "Training is left out: if it takes a large part of a step, the gain is smaller."
    return " ".join(filter(None, (f"{factor}{care}.", training, cut_off(profile.workload))))


def profile_page(title: str, profile: Profile) -> str:
    """Return the page: verdict, lengths, tail, and the frontier of throughput against staleness."""
    lengths, chosen = profile.lengths, profile.chosen
    counts = np.histogram(lengths, 56, (0, 1.04 * lengths.max()))[0]
    legend = legend_of([Series("responses", [], "c-blue"), Series("of them truncated", [], "c-red")])
    plot = both_widths(
        *(
            histogram(
                "Response lengths",
                lengths.tolist(),
                profile.truncated.tolist(),
                high=1.04 * float(lengths.max()),
                top=2.5 * float(counts.max()),
                size=(size[0], 230),
                x_title="response length in tokens",
                bins=bins,
            )
            for size, bins in ((WIDE, 56), (HALF, 28))
        )
    )
    episodes = [] if profile.turns is None else [turns_of(profile.turns)]
    tiles = [
        Tile("Gain to expect", f"× {profile.gain:.2f}", f"consumed tokens/s, with {chosen.name}"),
        Tile("Tail of a step", percent(profile.tail.share), f"of its time, for the last {LAST:.0%} of samples"),
        Tile("Slots at work", percent(profile.tail.step_occupancy), "in a synchronous step"),
        Tile("p99 / median", compact(profile.spread), f"correlation in groups {profile.workload.correlation:.2f}"),
    ]
    return page(
        title,
        profile.verdict,
        tiles,
        [
            Section("Response lengths", legend + plot, " ".join((lengths_of(profile), *episodes))),
            Section("A synchronous step", "", tail_of(profile)),
            Section("Throughput against staleness", frontier(profile.points), f"{FRONTIER} {trust_of(profile)}"),
            Section(
                "Every figure", table_of(profile.points, chosen), f"In bold: {chosen.name}, the smallest good one."
            ),
        ],
        "Written by april profile. Lengths, tail and costs are measured; throughput is simulated from them.",
    )
