"""Partial against synchronous rollouts at equal slots; an update after each step drops the KV caches.

A synchronous step of 16 groups of four takes about one decode pass for each token of its longest response.
"""

from __future__ import annotations

from typing import Any

from gpu_parts.arms import served, workload
from gpu_parts.bench import Bench
from parts import Figures

from april.engines.embedded import EmbeddedEngine


def measure(bench: Bench) -> Figures:
    model, work = bench.model(bench.shape), workload(bench)
    size = work.rollout_batch_size
    arms: dict[str, dict[str, Any]] = {"synchronous": {"partial_rollout": False}}
    arms |= {f"N'/N = {ratio:g}": {"over_sampling_batch_size": int(ratio * size)} for ratio in (1.5, 2.0)}
    base = 0.0
    for name, settings in arms.items():
        engine = EmbeddedEngine(model, max_num_seqs=bench.size(64, 4), context_length=bench.size(1024, 256))
        found = served(bench, engine, work, engine.update_weights, base, settings)
        base = base or found["consumed_tokens_per_second"]
        yield name, found
