"""Python's garbage collector in a process that holds many samples.

By default the collector examines all young objects after every 700 new ones, and all objects once their number has
grown by a quarter. With 262,144 samples, none of them garbage, that doubles the work of the scheduler
(benchmarks/simulation/scheduler_share.json).
"""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 100)
"""New objects before a collection of the youngest generation, and collections of a generation before one of the
next."""


def raise_gc_thresholds() -> None:
    """Make collections rare in this process."""
    gc.set_threshold(*THRESHOLDS)
