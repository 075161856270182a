"""What a recipe with `trainer.layout = "shared"` needs of its parts: moved memory, checks of memory and versions."""

from __future__ import annotations

import functools
import logging
import sys

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.devices import DeviceMap
from april.engines.freed_memory import FreedMemory
from april.engines.gpus import Gpu, used_bytes
from april.training.memory_plan import MemoryPlan, plan_memory
from april.training.offload import EVERY_PART, Part
from april.training.offload_plan import parts_away
from april.training.policy import gpu_bytes

log = logging.getLogger(__name__)


def moved_parts(recipe: Recipe, plan: MemoryPlan | None) -> frozenset[Part]:
    """Return the parts of the trainer's memory that leave the devices while the engine has them.

    Args:
        plan: None if the memory of this architecture cannot be planned.
    """
    if plan is not None:
        return parts_away(recipe, plan, gpu_bytes(recipe.model))
    shared = recipe.engine.engine == "embedded" and not recipe.trainer.sharded
    return EVERY_PART - {Part.PARAMETERS, Part.ROUNDED} if shared else EVERY_PART


def planned(recipe: Recipe) -> MemoryPlan | None:
    """Return the recipe's memory plan; None if this architecture cannot be planned."""
    try:
        return plan_memory(recipe)
    # As for `check_memory`: some architectures cannot run on tensors without values.
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        log.warning("memory was not planned: %s", str(error).partition("\n")[0])
        return None


def freed_memory(recipe: Recipe, plan: MemoryPlan | None, devices: DeviceMap | None) -> FreedMemory:
    """Return the check of the memory that the engine releases, before any engine has started."""
    gpus: dict[str, Gpu] = {}
    if devices is not None and recipe.engine.engine != "embedded":
        own = devices.training if recipe.generates_inside else [gpu for engine in devices.engines for gpu in engine]
        gpus = {gpu.id: gpu for gpu in own}
    probe = functools.partial(used_bytes, tuple(gpus.values())) if gpus else dict
    return FreedMemory(probe, plan.first["engine's weights"] if plan else 0)


def check_server_version(recipe: Recipe) -> None:
    """Check, before anything is loaded, that sleeping was tested with the version of the engine.

    Raises:
        ConfigError: it was not, or there is no such engine.
    """
    from april.engines.servers.installed import installed, installed_in
    from april.engines.servers.sglang import SGLang
    from april.engines.servers.vllm import VLLM

    kind = recipe.engine.engine
    if kind == "embedded":
        return
    api = SGLang if kind == "sglang" else VLLM
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
