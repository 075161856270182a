"""april's training step against TRL's loss: the same samples, the same update, micro-batches of equal size."""

from __future__ import annotations

import copy

import torch
from gpu_parts.bench import Bench, rolled_out
from parts import Figures
from record import spread
from training_step import SIDES

MICRO_BATCH = 4
"""Samples of a micro-batch of TRL's; april's has the same number of tokens."""
DIFFERENCE = 0.02
"""By which the two gradients' norms may differ, relatively; both sides compute in one type. An assumption."""


def measure(bench: Bench) -> Figures:
    most = bench.size(256, 16)
    model = bench.model(bench.shape)
    step = rolled_out(bench, model, bench.size(8, 2), bench.size(128, 8), most)
    del model
    recipe = bench.recipe(str(bench.dtype).removeprefix("torch."))
    recipe.model.compute_dtype = recipe.model.dtype  # TRL has no master weights: the same types on both sides
    recipe.rollout.n_samples_per_prompt, recipe.rollout.max_response_length = 8, most
    tokens = MICRO_BATCH * (bench.size(128, 8) + most)
    sides = {
        name: side(bench.model(bench.shape), copy.deepcopy(recipe), step, MICRO_BATCH if name == "trl" else tokens)
        for name, side in SIDES.items()
    }
    norms = {name: side.run() for name, side in sides.items()}
    yield "gradient_norms", norms
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, int] = {}
    for _ in range(bench.size(4, 1)):
        for name, side in sides.items():
            if bench.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            began = bench.clock()
            side.run()
            times[name].append(bench.clock() - began)
            if bench.on_gpu:
                peaks[name] = torch.cuda.max_memory_allocated()
    trained = sum(len(sample.prompt_ids) + sample.length for group in step.groups for sample in group.samples)
    yield "tokens", trained
    yield "tokens_per_second", {name: spread([trained / t for t in taken]) for name, taken in times.items()}
    yield "april_over_trl", spread([b / a for a, b in zip(times["april"], times["trl"], strict=True)])
    yield "peak_bytes_with_both_loaded", peaks
    apart = abs(norms["april"] - norms["trl"]) / norms["trl"]
    yield "failures", [f"the gradients' norms are {apart:.1%} apart"] if not apart <= DIFFERENCE else []
