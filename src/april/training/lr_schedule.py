"""Learning-rate schedules."""

from __future__ import annotations

import math

from april.config.settings.training_settings import TrainingSettings


def lr_factor(settings: TrainingSettings, step: int) -> float:
    """Return the factor on every learning rate in training step `step`, from 1."""
    warmup, steps = settings.warmup_steps, settings.steps
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / max(steps - warmup, 1)
    if settings.lr_schedule == "linear":
        return max(1 - progress, 0.0)
    if settings.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return 1.0
