"""How much of a device the embedded engine's KV cache may take beside the trainer.

The trainer's parameters and optimizer state are allocated before the engine is built, so what is free then is what
generation may take. Where the cache stays during training, what training will allocate is subtracted.
"""

from __future__ import annotations

import os

import torch

from april.config.recipe import Recipe
from april.training.memory_plan import pass_bytes, planned

SHARES = {"cuda": 0.9, "cpu": 0.5}
"""Of the memory that remains: a GPU's is the run's own, the machine's is also for rewards, files and other programs."""


def kv_cache_bytes(recipe: Recipe, device: torch.device) -> int:
    """Return the budget of an engine in the trainer's process: the recipe's own, or what the trainer leaves."""
    if recipe.engine.kv_cache_gb is not None:
        return int(recipe.engine.kv_cache_gb * 1e9)
    to_come = pass_bytes(recipe)
    if recipe.keeps_cache_in_training:
        to_come += planned(recipe).transient_bytes
    return max(int((free_bytes(device) - to_come) * SHARES.get(device.type, 0.5)), 0)


def free_bytes(device: torch.device) -> int:
    """Memory that nothing has taken; of a GPU also what PyTorch holds and does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 << 30
