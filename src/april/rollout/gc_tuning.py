"""Python's garbage collector in a process that holds many samples.

By default the collector examines all young objects after every 700 new ones, and all objects once their number has
grown by a quarter. Samples, none of which are garbage, then double the work of the scheduler: reference counts free
them. So the objects of a whole step fit the youngest generation, and few of them are ever examined
(benchmarks/simulation/scheduler_share_collector.json).
"""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 100)
"""New objects before a collection of the youngest generation, and collections of a generation before one of the
next."""
OBJECTS_PER_SAMPLE = 32
"""Objects for each sample that a step trains on, more than there are at N' = 2 N: a sample, its request, and five
for its segments under three policy versions, twice."""


def raise_gc_thresholds(samples_per_step: int = 0) -> None:
    """Make collections rare in this process.

    Args:
        samples_per_step: samples that a step trains on, if the process holds samples.
    """
    youngest, *older = THRESHOLDS
    gc.set_threshold(max(youngest, OBJECTS_PER_SAMPLE * samples_per_step), *older)
