"""Checks of a recipe with `trainer.layout = "shared"`: memory that engines release, and versions of engines."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.device_memory import held_bytes
from april.engines.devices import DeviceMap
from april.engines.freed_memory import FreedMemory
from april.engines.gpus import used_bytes
from april.training.device_map import own_gpus
from april.training.distributed_learner import DistributedLearner
from april.training.learner import Learner
from april.training.memory_plan import MemoryPlan
from april.training.offload import Part
from april.training.offload_plan import TRAINER_CONTEXT, check_host_memory, resident_bytes
from april.training.policy import device_of

log = logging.getLogger(__name__)


def freed_memory(
    recipe: Recipe,
    plan: MemoryPlan | None,
    devices: DeviceMap | None,
    moved: frozenset[Part],
    learner: Learner | None = None,
) -> FreedMemory:
    """Return the check of the memory that the engine releases, before any engine has started.

    Args:
        moved: parts of the trainer's memory that are not on the devices then.
        learner: reads the memory of ranks, if engines are on nodes of a cluster.
    """
    own = resident_bytes(plan, moved) + TRAINER_CONTEXT if plan else None
    return FreedMemory(
        _probe(recipe, devices, learner), plan.first["engine's weights"] if plan else 0, _flag(recipe), own
    )


def _probe(recipe: Recipe, devices: DeviceMap | None, learner: Learner | None) -> Callable[[], Mapping[str, int]]:
    """Return a function that returns the bytes in use of each device whose engine sleeps."""
    if recipe.engine.engine == "embedded":
        return dict
    if recipe.cluster.enabled:  # engines are on the GPUs of ranks, and each rank reads the memory of its own
        if isinstance(learner, DistributedLearner):
            return learner.device_bytes
        return functools.partial(used_bytes, tuple(own_gpus(recipe)))
    if devices is not None:
        own = devices.training if recipe.generates_inside else [gpu for engine in devices.engines for gpu in engine]
        gpus = {gpu.id: gpu for gpu in own}
        return functools.partial(used_bytes, tuple(gpus.values()))
    device = device_of(recipe.model)
    if device.type == "cuda" and recipe.generates_inside:  # the package that counts GPUs is not installed
        return functools.partial(_used_here, device)
    return dict


def _used_here(device: torch.device) -> dict[str, int]:
    return {str(device.index or 0): held_bytes(device)}


def _flag(recipe: Recipe) -> str:
    """Return the option without which the recipe's engine releases nothing."""
    kind = recipe.engine.engine
    return "" if kind == "embedded" else "enable_sleep_mode" if kind == "vllm-inproc" else str(_api(kind).flag)


def _api(kind: str) -> Any:
    """Return the API of a kind of server."""
    from april.engines.servers.sglang import SGLang
    from april.engines.servers.vllm import VLLM

    return SGLang if kind == "sglang" else VLLM


def keeps_own_weights(recipe: Recipe, left_out: Sequence[str], plan: MemoryPlan | None, memory: float | None) -> bool:
    """Return whether engines have to keep their weights in host memory while they sleep: tensors of the model's files
    that the trainer does not have are never sent to them again.

    Args:
        left_out: names of such tensors.
        memory: bytes of a GPU; None on CPUs.

    Raises:
        ConfigError: host memory is too small for that.
    """
    if not left_out or recipe.engine.engine == "embedded":
        return False
    log.warning(
        "the trainer has no parameters for the tensors %s of %s: engines keep their weights in host memory while they "
        "sleep, because an update does not contain these tensors",
        ", ".join(left_out),
        recipe.model.path,
    )
    if plan is not None:
        check_host_memory(recipe, plan, memory, keeps_weights=True)
    return True


def check_server_version(recipe: Recipe) -> None:
    """Check, before anything is loaded, that sleeping was tested with the version of the engine.

    Raises:
        ConfigError: it was not, or there is no such engine.
    """
    from april.engines.servers.installed import installed, installed_in

    kind = recipe.engine.engine
    if kind == "embedded" or recipe.cluster.enabled:  # servers on nodes are checked when they are connected
        return
    api = _api(kind)
    python = None if kind == "vllm-inproc" else recipe.engine.server_python
    try:
        found = installed_in(python) if python else installed()
    except OSError as error:
        raise ConfigError(f"engine.server_python: {error}") from None
    version = found.get(api.kind.lower())
    where = python or sys.executable
    if version is None:
        raise ConfigError(f'engine.engine = "{kind}": {where} has no {api.kind}: set engine.server_python')
    if not version.startswith(api.tested):
        tested = " or ".join(api.tested)
        raise ConfigError(
            f'{where} has {api.kind} {version}, but trainer.layout = "shared" was tested with {tested}: install that '
            'version, or set trainer.layout = "split"'
        )
