"""Ten updates at a learning rate of 1e-6: the share of the parameters with a gradient that they change.

Parameters and optimizer in float32 with computation in bfloat16, and for comparison both in bfloat16.
"""

from __future__ import annotations

import torch
from gpu_parts.bench import Bench, rolled_out
from parts import Figures

from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner

UPDATES = 10
WANTED = 0.99


def measure(bench: Bench) -> Figures:
    step = rolled_out(bench, bench.model(bench.shape), bench.size(4, 2), 32, bench.size(96, 8))
    shares = {}
    for dtype in ("float32", "bfloat16"):
        recipe = bench.recipe(dtype)
        recipe.model.compute_dtype = "bfloat16"
        recipe.training.learning_rate, recipe.training.lr_schedule = 1e-6, "constant"
        learner = LocalLearner(bench.model(bench.shape, getattr(torch, dtype)), LearnerSettings.of(recipe))
        trained = learner.masters.trained(learner.policy)
        before = [parameter.detach().clone() for parameter in trained]
        for number in range(1, UPDATES + 1):
            metrics = learner.train(step, number)
        meant = [learner.optimizer.state[parameter]["exp_avg"] != 0 for parameter in trained]  # has had a gradient
        changed = [(now != then) & has for now, then, has in zip(trained, before, meant, strict=True)]
        shares[dtype] = float(sum(map(torch.count_nonzero, changed)) / sum(map(torch.count_nonzero, meant)))
        yield (
            f"parameters in {dtype}, computation in bfloat16",
            {"changed_share": shares[dtype], "gradient_norm": metrics["grad_norm"], "updates": UPDATES},
        )
        del learner, trained, before, changed, meant
    yield "failures", [] if shares["float32"] > WANTED else [f"{shares['float32']:.1%} changed, wanted {WANTED:.0%}"]
