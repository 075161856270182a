"""Peak memory of a training step, against `april memory`; float32 parameters, computation in the device's type."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import torch
from gpu_parts.bench import Bench, rolled_out
from parts import Figures

from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.memory_plan import RESIDENT, plan_memory


def measure(bench: Bench) -> Figures:
    length = bench.size(1024, 32)
    step = rolled_out(bench, bench.model(bench.shape), bench.size(2, 1), length - bench.size(64, 8), bench.size(64, 8))
    gc.collect()
    recipe = bench.recipe()
    recipe.model.compute_dtype = "bfloat16"
    recipe.rollout.max_response_length = length
    recipe.training.max_tokens_per_micro_batch = 8 * length
    with tempfile.TemporaryDirectory() as folder:
        bench.config(bench.shape).save_pretrained(folder)
        recipe.model.path = folder
        plan = plan_memory(recipe)
    yield "planned", plan.rank
    expected = {"training": sum(plan.rank.values()), "resident": sum(plan.rank[name] for name in RESIDENT)}
    yield "planned_bytes", expected
    if not bench.on_gpu:
        LocalLearner(bench.model(bench.shape, torch.float32), LearnerSettings.of(recipe)).train(step, 1)
        return
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    learner = LocalLearner(bench.model(bench.shape, torch.float32), LearnerSettings.of(recipe))
    learner.train(step, 1)
    gc.collect()
    found: dict[str, Any] = {"resident": torch.cuda.memory_allocated() - before}
    torch.cuda.reset_peak_memory_stats()
    learner.train(step, 2)
    found["training"] = torch.cuda.max_memory_allocated() - before
    yield "measured_bytes", found
    yield "reserved_bytes", torch.cuda.max_memory_reserved()
    yield "planned_over_measured", {name: expected[name] / found[name] for name in found}
    free, total = torch.cuda.mem_get_info()
    yield "outside_allocator_bytes", total - free - torch.cuda.memory_reserved()
