"""Shared and split GPUs against synchronous rollouts, in virtual time: 1, 8 and 64 H100s, 8B and 30B-A3B.

Responses have up to 16k tokens.
Costs are rooflines, and times of a turn are assumptions (`april.simulation.turn_over`); nothing here was measured on a
GPU. Each layout is shown at its best N' after the price of staleness. A combination is saved as soon as it is done.

    python benchmarks/simulation/layouts.py [--only 8]
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from april.config.recipe import Recipe
from april.simulation.cluster import gpu_cluster
from april.simulation.hardware import GPUS, LORA_TRAINER_BYTES, MODELS, TRAINER_BYTES
from april.simulation.layouts import compare, sentence
from april.simulation.turn_over import TurnOver
from april.simulation.workload import WORKLOADS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save

SLOTS = 256
GROUP = 8
BUDGET = 16384
BATCHES = {1: 16, 8: 64, 64: 256}
"""Groups of a step, N, by the number of GPUs."""
TRAINING = {1: (), 8: (2, 4), 64: (16, 32)}
"""Training GPUs of the splits, by the number of GPUs."""
ENGINE_GPUS = {"qwen3-8b": 1, "qwen3-30b-a3b": 2}
"""GPUs of an engine, by policy; on one GPU, one."""
STEPS, WARM_UP = {1: 24, 8: 16, 64: 10}, {1: 8, 8: 6, 64: 4}


def comparison(gpus: int, model: str, lora: bool) -> dict[str, Any]:
    recipe = Recipe()
    recipe.rollout.rollout_batch_size, recipe.rollout.n_samples_per_prompt = BATCHES[gpus], GROUP
    recipe.rollout.max_response_length, recipe.rollout.max_staleness = BUDGET, 2
    recipe.engine.engine = "vllm"
    trainer_bytes = LORA_TRAINER_BYTES if lora else TRAINER_BYTES
    cluster = functools.partial(
        gpu_cluster,
        GPUS["h100"],
        MODELS[model],
        gpus,
        slots=SLOTS,
        engine_gpus=min(ENGINE_GPUS[model], gpus),
        trainer_bytes=trainer_bytes,
        turn_over=TurnOver(),
    )
    found = compare(
        recipe,
        replace(WORKLOADS["lognormal"], prompt_tokens=200),
        lambda training: cluster(training_gpus=training),
        gpus,
        TRAINING[gpus],
        STEPS[gpus],
        WARM_UP[gpus],
        lambda done: print(f"{gpus} GPUs, {model}: {done}", flush=True),
        ratios=(1.25, 1.5, 2.0, 3.0) if gpus < 64 else (1.5, 2.0),
    )
    return {
        "gpus": gpus,
        "model": model,
        "lora": lora,
        "rollout_batch_size": BATCHES[gpus],
        "n_samples_per_prompt": GROUP,
        "layouts": [layout.to_dict() for layout in found],
        "sentence": sentence(found, gpus),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=int, nargs="*", default=list(BATCHES))
    chosen = parser.parse_args().only
    results = []
    for gpus in chosen:
        for model in ENGINE_GPUS:
            for lora in (False, True) if gpus == 1 else (False,):
                results.append(comparison(gpus, model, lora))
                print(results[-1]["sentence"], flush=True)
                save(__file__, {"hardware": "h100", "max_staleness": 2, "comparisons": results})


if __name__ == "__main__":
    main()
