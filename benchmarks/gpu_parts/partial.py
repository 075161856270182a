"""Partial against synchronous rollouts at equal slots; an update after each step drops the KV caches.

A synchronous step of 16 groups of four takes about one decode pass for each token of its longest response.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gpu_parts.bench import Bench
from parts import Figures

from april.engines.embedded import EmbeddedEngine
from april.simulation.measurement import serve
from april.simulation.workload import Part, Workload


def measure(bench: Bench) -> Figures:
    model = bench.model(bench.shape)
    work = Workload(
        "gpu",
        (Part(bench.size(64, 8), 0.9),),
        max_tokens=bench.size(256, 32),
        prompt_tokens=bench.size(64, 8),
        rollout_batch_size=bench.size(16, 4),
        n_samples_per_prompt=bench.size(4, 2),
    )
    size = work.rollout_batch_size
    arms: dict[str, dict[str, Any]] = {"synchronous": {"partial_rollout": False}}
    arms |= {f"N'/N = {ratio:g}": {"over_sampling_batch_size": int(ratio * size)} for ratio in (1.5, 2.0)}
    base = 0.0
    for name, settings in arms.items():
        engine = EmbeddedEngine(model, max_num_seqs=bench.size(64, 4), context_length=bench.size(1024, 256))
        outcome = asyncio.run(
            serve(
                engine,
                work,
                engine.update_weights,
                steps=bench.size(4, 2),
                warm_up=1,
                vocabulary=bench.shape.vocabulary,
                clock=bench.clock,
                **settings,
            )
        )
        base = base or outcome.consumed_tokens_per_second
        yield (
            name,
            {
                "consumed_tokens_per_second": outcome.consumed_tokens_per_second,
                "ratio_to_synchronous": outcome.consumed_tokens_per_second / base,
                "mean_staleness": outcome.mean_staleness,
                "occupancy": outcome.occupancy,
            },
        )
