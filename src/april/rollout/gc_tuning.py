"""Python's garbage collector in a process that holds many samples.

It looks through all young objects each time that 700 more have come, and through all there are when they are a quarter
more: with 262,144 samples under way, of which none is garbage, that is as much work again as the scheduler's own
(benchmarks/simulation/scheduler_share.json).
"""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 100)
"""Objects more than went, before the youngest are looked through; and how many times before the next older ones are."""


def raise_gc_thresholds() -> None:
    """Set this process's collector to look seldom."""
    gc.set_threshold(*THRESHOLDS)
