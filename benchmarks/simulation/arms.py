"""The engine that the scheduling benchmarks simulate, and one run of one setting on it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from april.simulation.cost_model import CostModel
from april.simulation.run import Outcome, simulate
from april.simulation.workload import WORKLOADS, Workload

# Bytes and FLOPs of Qwen3-8B in bfloat16 over 70 % of an MI300X's bandwidth and 45 % of its FLOP/s: what
# `roofline(GPUS["mi300x"], MODELS["qwen3-8b"])` of april.simulation.hardware computes, rounded and written down, so
# that these figures stay when a preset changes.
COST = CostModel(
    slots=256,
    kv_tokens=995_681,
    decode_batches=(1, 128, 192, 256),
    decode_seconds=(0.00608, 0.00608, 0.00694, 0.00859),
    kv_token_seconds=3.9746e-8,
    prefill_token_seconds=2.5735e-5,
    prefill_pair_seconds=5.0142e-10,
    update_seconds=1.655,
    interrupt_seconds=0.1,
    source="roofline: qwen3-8b on mi300x",
)
BOUND = 5
STEPS, WARM_UP = 36, 10
"""Steps for a batch of 32 groups; a smaller batch takes more steps, so that every figure covers equally many groups."""


def ceiling(workload: Workload) -> float:
    """Consumed tokens/s with every slot decoding a response of this workload at all times, without other costs; if
    lengths drift, with the lengths in the middle of the counted steps."""
    lengths = workload.sample(50_000, version=(WARM_UP + STEPS) // 2).astype(float)
    resident = workload.prompt_tokens * float(np.exp(0.125)) + (lengths**2).sum() / (2 * lengths.sum())
    return COST.ceiling(resident)


def measure(name: str, seed: int, **settings: Any) -> Outcome:
    """One run; prompts, their lengths and the samples follow from `seed`."""
    workload = dataclasses.replace(WORKLOADS[name], seed=seed)
    times = 32 // workload.rollout_batch_size
    steps, warm_up = STEPS * times, WARM_UP * times
    return simulate(workload, COST, steps=steps, warm_up=warm_up, resolution=1.0, seed=seed, **settings)


def figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "consumed_tokens_per_second": outcome.consumed_tokens_per_second,
        "generated_tokens_per_second": outcome.generated_tokens_per_second,
        "mean_response_tokens": float(outcome.lengths.mean()),
        "mean_staleness": outcome.mean_staleness,
        "max_staleness": outcome.max_staleness,
        "off_policy_token_share": outcome.off_policy_token_share,
        "occupancy": outcome.occupancy,
        "prefilled_tokens": outcome.prefilled_tokens,
        "preemptions": outcome.preemptions,
    }


def save(script: str, results: dict[str, Any], **more: Any) -> None:
    """Write the JSON file into the script's folder. Virtual time depends on no machine, so none is named."""
    settings = {"cost": vars(COST), "steps": STEPS, "warm_up": WARM_UP, "max_staleness": BOUND}
    document = {"command": " ".join(["python", f"benchmarks/simulation/{Path(script).name}", *sys.argv[1:]])}
    path = Path(script).with_suffix(".json")
    path.write_text(json.dumps({**document, "settings": settings, **more, "results": results}, indent=1) + "\n")
