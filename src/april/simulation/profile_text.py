"""Results of a profile, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from april.reporting.formats import seconds
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
