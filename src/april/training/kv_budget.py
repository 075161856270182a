"""Memory budget of the embedded engine's KV cache on the trainer's device.

The trainer's parameters and optimizer state are allocated before the engine is built, so generation may
use the memory that is free then. If the cache is kept during training, the memory of a training step is subtracted.
"""

from __future__ import annotations

import torch

from april.config.recipe import Recipe
from april.engines.device_memory import free_bytes
from april.training.memory_plan import pass_bytes, plan_memory

SHARES = {"cuda": 0.9, "cpu": 0.5}
"""Share of the remaining memory for the cache: the run has a GPU alone, but shares main memory with other programs."""


def kv_cache_bytes(recipe: Recipe, device: torch.device) -> int:
    """Return the budget of an engine in the trainer's process: the recipe's setting, or the memory left by training."""
    if recipe.engine.kv_cache_bytes is not None:
        return recipe.engine.kv_cache_bytes
    to_come = pass_bytes(recipe)
    if recipe.keeps_cache_in_training:
        to_come += plan_memory(recipe).transient_bytes
    return max(int((free_bytes(device) - to_come) * SHARES.get(device.type, 0.5)), 0)
