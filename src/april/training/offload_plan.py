"""Memory of trainer and engine on the same devices: which parts of the trainer leave while the engine generates.

Invariant: an engine that computes with the trainer's parameters keeps them on the device.
"""

from __future__ import annotations

import math
import re

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.device_memory import available_host_bytes
from april.training.memory_plan import USABLE, MemoryPlan, has_master_weights
from april.training.offload import Part

UTILISATION = 0.9
"""Largest share of a GPU's memory that april gives to vLLM unless `engine.server_args` names one."""
SHARE_OPTIONS = r"--(?:gpu-memory-utilization|mem-fraction-static)[ =]([0-9.]+)"
SLEEPING = 1_500_000_000
"""Memory of a GPU that a sleeping server keeps, in bytes: CUDA context, graphs and NCCL's buffers. An assumption: not
measured."""
TRAINER_CONTEXT = 2_000_000_000
"""Memory of a GPU that a training process keeps in addition to its tensors, in bytes: CUDA context, NCCL's and cuBLAS's
buffers. An assumption: not measured."""
HOST_USABLE = 0.9
"""Share of the available host memory that the trainer's buffers may take."""


def shares_parameters(recipe: Recipe) -> bool:
    """Return whether the engine computes with the trainer's parameters: the embedded engine in the only training
    process. With adapters it shares all parameters that no adapter changes."""
    return recipe.generates_inside and recipe.engine.engine == "embedded" and not recipe.trainer.sharded


def parts_away(recipe: Recipe, plan: MemoryPlan | None, memory: float | None = None) -> frozenset[Part]:
    """Return the parts of the trainer that are in host memory while engines generate, the minimum that makes room.

    Moments leave first, then master weights or parameters, then the rounded copy.

    Args:
        plan: None if the memory of this architecture cannot be planned: every part that may leave does.
        memory: bytes of a GPU; None on CPUs, where every part that may leave does.
    """
    if not recipe.shares_devices:
        return frozenset()
    leaving = [Part.OPTIMIZER, Part.PARAMETERS, Part.ROUNDED]
    if shares_parameters(recipe):  # master weights may leave, and the copy that the engine computes with stays
        leaving = leaving[:2] if has_master_weights(recipe) else leaving[:1]
    away = {Part.GRADIENTS}
    for part in leaving:
        if plan and memory is not None and resident_bytes(plan, away) <= room_beside_engine(recipe, plan, memory):
            break
        away.add(part)
    return frozenset(away)


def resident_bytes(plan: MemoryPlan, away: frozenset[Part] | set[Part]) -> int:
    """Return the trainer's memory on a device between steps, without the parts that are away."""
    kept = (Part.PARAMETERS, Part.ROUNDED, Part.OPTIMIZER)
    return sum(plan.rank.get(part.value, 0) for part in kept if part not in away)


def room_beside_engine(recipe: Recipe, plan: MemoryPlan, memory: float) -> float:
    """Return the bytes of a GPU that generation leaves to the trainer."""
    if not recipe.generates_inside:
        return memory * (1 - server_share(recipe, memory)) - SLEEPING - TRAINER_CONTEXT
    if recipe.engine.engine == "vllm-inproc":
        return memory * (1 - recipe.engine.gpu_memory_utilization) - SLEEPING - TRAINER_CONTEXT
    # The embedded engine allocates its KV cache on demand, up to all samples of full length.
    return memory * USABLE - sum(plan.first.values()) - plan.engine_pass


def server_share(recipe: Recipe, memory: float | None) -> float:
    """Return the share of a GPU's memory that a server takes; april's choice leaves room for the trainer's context.

    Args:
        memory: bytes of a GPU; None if unknown.
    """
    named = re.findall(SHARE_OPTIONS, " ".join(recipe.engine.server_args))
    if named:
        return float(named[-1])
    if recipe.engine.engine == "sglang":  # it leaves the rest to its own activations and graphs
        return 1.0
    least = (SLEEPING + TRAINER_CONTEXT) / memory if memory else 0.0
    return min(UTILISATION, math.floor((1 - least) * 100) / 100)


def share_arguments(recipe: Recipe, memory: float | None) -> list[str]:
    """Return the option that gives vLLM its share of a GPU shared with the trainer: its own default is more than the
    trainer's context leaves."""
    if recipe.engine.engine != "vllm" or re.search(SHARE_OPTIONS, " ".join(recipe.engine.server_args)):
        return []
    return ["--gpu-memory-utilization", f"{server_share(recipe, memory):g}"]


def host_parts(recipe: Recipe, plan: MemoryPlan, memory: float | None = None) -> dict[str, int]:
    """Return the bytes of host memory of each rank, by part: `cpu_offload`, and parts that are away in turns."""
    away = parts_away(recipe, plan, memory) - {Part.GRADIENTS}  # gradients are freed after each step
    turns = {part.value: plan.rank[part.value] for part in Part if part in away and plan.rank.get(part.value)}
    return plan.host | turns


def check_host_memory(
    recipe: Recipe, plan: MemoryPlan, memory: float | None = None, keeps_weights: bool = False
) -> None:
    """Compare host memory that the trainer's parts take in turns with what this machine has.

    Args:
        keeps_weights: engines keep their weights there while they sleep.

    Raises:
        ConfigError: it is too little.
    """
    parts = host_parts(recipe, plan, memory)
    names, needed, room = list(parts), recipe.ranks_here * sum(parts.values()), available_host_bytes() * HOST_USABLE
    if keeps_weights:
        engines = max(recipe.engines_beside, 1) * max(recipe.gpus_per_engine, 1)
        needed += engines * plan.first["engine's weights"]
        names.append("weights of engines that sleep")
    if needed > room:
        raise ConfigError(
            f'trainer.layout = "shared": {" and ".join(names)} take {needed / 1e9:.1f} GB of host memory while engines '
            f"generate, and this machine has {room / 1e9:.1f} GB to plan with: set lora.rank, lower the engine's share "
            "of the GPU (engine.server_args), or give engines GPUs of their own"
        )
