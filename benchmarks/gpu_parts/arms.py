"""Arms of a comparison of rollouts with an embedded engine: their workload, and the figures of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gpu_parts.bench import Bench

from april.engines.embedded import EmbeddedEngine
from april.simulation.measurement import serve
from april.simulation.workload import Part, Workload


def workload(bench: Bench) -> Workload:
    return Workload(
        "gpu",
        (Part(bench.size(64, 8), 0.9),),
        max_tokens=bench.size(256, 32),
        prompt_tokens=bench.size(64, 8),
        rollout_batch_size=bench.size(16, 4),
        n_samples_per_prompt=bench.size(4, 2),
    )


def served(
    bench: Bench,
    engine: EmbeddedEngine,
    work: Workload,
    update: Callable[[int], Awaitable[None]],
    base: float,
    settings: dict[str, Any],
) -> dict[str, float]:
    """Run some steps, and return the arm's figures.

    Args:
        update: called with each version.
        base: consumed tokens/s of the synchronous arm; 0 if this is it.
        settings: the arm's settings of the rollouts.
    """
    outcome = asyncio.run(
        serve(
            engine,
            work,
            update,
            steps=bench.size(4, 2),
            warm_up=1,
            vocabulary=bench.shape.vocabulary,
            clock=bench.clock,
            **settings,
        )
    )
    rate = outcome.consumed_tokens_per_second
    return {
        "consumed_tokens_per_second": rate,
        "ratio_to_synchronous": rate / (base or rate),
        "mean_staleness": outcome.mean_staleness,
        "occupancy": outcome.occupancy,
    }
