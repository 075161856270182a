"""The price of stale data, from april's own study, so that recommendations do not rest on throughput alone.

The study (`benchmarks/accuracy/trade_analysis.json`, docs/staleness.md) trained pairs of synchronous and partial runs
of the same seeds for the same number of steps. Partial runs at N' = 1.5 N, 2 N and 3 N reached lower accuracy, and at
2 N a quarter more steps made up for the loss. A setting's rate is therefore divided by 1 + 0.29 for each weight update
of mean staleness.

The study's policies are small and its runs have 12 steps. Other policies, longer runs and other staleness are
extrapolated.
"""

from __future__ import annotations

import numpy as np

LOST = ((0.0, 0.0), (0.443, 0.0049), (0.868, 0.0137), (1.571, 0.0259))
"""Mean staleness, in weight updates, and loss of final accuracy against synchronous runs after equal steps."""
MORE_STEPS = 0.29
"""Additional steps for each update of mean staleness, relative to synchronous rollouts: 15 steps instead of 12 at a
mean staleness of 0.868."""


def worth(rate: float, mean_staleness: float, more_steps: float = MORE_STEPS) -> float:
    """Return the rate of synchronous rollouts that reaches the same accuracy in the same time."""
    return rate / (1 + more_steps * mean_staleness)


def price(mean_staleness: float) -> str:
    """Return what data so stale cost in the study, in words; "" for none."""
    if mean_staleness < 0.005:
        return ""
    ages, losses = zip(*LOST, strict=True)
    if mean_staleness > ages[-1]:
        lost = f"more than {losses[-1]:.3f} (nothing staler than {ages[-1]:.2f} was measured)"
    else:
        lost = f"about {np.interp(mean_staleness, ages, losses):.3f}"
    return (
        f"A mean staleness of {mean_staleness:.2f} updates lowered the final accuracy of small policies by {lost}, "
        f"after as many steps; by that study {MORE_STEPS * mean_staleness:.0%} more steps make up for it "
        "(docs/staleness.md)."
    )
