"""Assignment of this machine's GPUs to training and engines.

Invariant: all processes compute the same assignment, the first one before a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from april.config.error import ConfigError
from april.config.machine import visible_gpus
from april.config.recipe import Recipe
from april.engines.devices import DeviceMap, GpuShortageError, assign
from april.engines.gpus import Gpu
from april.training.rank_protocol import is_rank


def device_map(recipe: Recipe, gpus: Sequence[Gpu] | None = None) -> DeviceMap | None:
    """Return the assignment for this machine; None if it has no GPUs, a cluster assigns them, or a single process does
    everything on a machine whose GPUs cannot be counted.

    Args:
        gpus: GPUs visible to this process; detected if None.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if recipe.cluster.enabled:
        return None
    try:
        gpus = visible_gpus() if gpus is None else gpus
    except ConfigError:
        if recipe.engines_here or recipe.trainer.sharded:
            raise
        return None
    engines, each, training = len(recipe.engines_here), _gpus_per_engine(recipe), _training(recipe)
    if not gpus:
        if engines and recipe.engine.gpus_per_replica not in ("auto", 0):
            asked = f"engine.gpus_per_replica = {recipe.engine.gpus_per_replica}"
            raise ConfigError(f"{asked}, but no GPU is visible on this machine: set it to 0, for servers on the CPU")
        return None
    try:
        return assign(gpus, training, engines, each, recipe.shares_devices)
    except GpuShortageError:
        raise ConfigError(_shortage(recipe, gpus, training, engines, each)) from None


def own_gpus(recipe: Recipe) -> list[Gpu]:
    """Return the GPUs of the run's ranks on this machine, by rank, if a cluster assigns GPUs to the others.

    Raises:
        ConfigError: they cannot be counted, or are too few.
    """
    if recipe.model.device == "cpu":
        return []
    gpus, here, first = visible_gpus(), recipe.ranks_here, _index(recipe.model.device)
    if gpus and first + here > len(gpus):
        raise ConfigError(
            f"{here} ranks train on this machine, and {len(gpus)} GPUs are visible here: lower trainer.processes, or "
            'set cluster.ranks = "nodes"'
        )
    return gpus[first : first + here]


def device_rows(recipe: Recipe, devices: DeviceMap) -> list[tuple[str, str]]:
    """Return each GPU and its task in the run."""
    return list(devices.rows(recipe.engines_here, recipe.engines_inside))


def _training(recipe: Recipe) -> Sequence[int]:
    """Return the indices of the visible GPUs on which this machine trains."""
    device = recipe.model.device
    if device == "cpu":
        return ()
    if is_rank():
        return range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if recipe.trainer.sharded:
        return range(recipe.trainer.processes)
    return (_index(device),)


def _index(device: str) -> int:
    """Return the number of the GPU that a device names; 0 if it names none."""
    return int(device.partition(":")[2] or 0)


def _gpus_per_engine(recipe: Recipe) -> int:
    """Return the number of GPUs of each engine that april starts on this machine."""
    if recipe.engine.own_process:
        return int(recipe.model.device != "cpu")
    return recipe.gpus_per_engine


def _shortage(recipe: Recipe, gpus: Sequence[Gpu], training: Sequence[int], engines: int, each: int) -> str:
    settings = recipe.engine
    visible = f"{len(gpus)} GPU{'s are' if len(gpus) > 1 else ' is'} visible on this machine"
    kind = "the engine's own process" if settings.own_process else f"{engines} server{'s' * (engines > 1)}"
    parts = []
    if training and not recipe.shares_devices:
        several = len(training) > 1
        parts.append(f"{len(training)} ranks take one each" if several else f"training takes GPU {training[0]}")
    if engines and each:
        parts.append(f"{kind} {'take' if engines > 1 else 'takes'} {each}{' each' * (engines > 1)}")
    return f"{visible}, but {' and '.join(parts)}: {_remedy(recipe, gpus, training, engines, each)}"


def _remedy(recipe: Recipe, gpus: Sequence[Gpu], training: Sequence[int], engines: int, each: int) -> str:
    if any(place >= len(gpus) for place in training):
        return "lower trainer.processes" if recipe.trainer.sharded else "name another one in model.device"
    if recipe.shares_devices:
        return "lower engine.replicas or engine.gpus_per_replica"
    if recipe.engine.own_process:
        return "leave engine.own_process out, and the engine works in the trainer's process, on its GPU"
    if engines * each > 1 and len(gpus) > len(training):
        return "lower engine.replicas, engine.gpus_per_replica or trainer.processes"
    return (
        'choose engine.engine = "embedded" or "vllm-inproc", which work on the trainer\'s GPU, or name servers '
        "elsewhere in engine.urls"
    )
