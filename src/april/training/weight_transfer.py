"""Weight transfer from the trained policy to the engine of a recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from april.config.recipe import Recipe
from april.engines.weight_transfer import InProcess, OnDisk, SharedParameters, TensorSource, WeightTransfer
from april.training.lora import Adapters
from april.training.offload import Readable, identity
from april.training.policy import save_policy
from april.training.stored_names import Parts, cut, stored_parts

if TYPE_CHECKING:
    from april.engines.servers.same_device import Exports


def model_transfer(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    directory: Path,
    adapters: Adapters | None = None,
    readable: Readable = identity,
) -> WeightTransfer:
    """Return the recipe's weight transfer from a model in this process.

    Args:
        directory: the run's directory; weights for servers go to its folder `weights`.
        adapters: the model's adapters; they are merged here or by the engine.
        readable: maps a parameter to its values, which may be in host memory.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        if adapters:
            return adapters.merged(readable)
        return ((name, readable(parameter).detach()) for name, parameter in model.named_parameters())

    if recipe.engine.engine == "embedded" and not recipe.engine.own_process and not recipe.cluster.enabled:
        # With adapters the engine has a merged copy, which each update has to fill.
        return InProcess(tensors) if adapters else SharedParameters()
    device = next(model.parameters()).device

    def save(path: Path) -> None:
        if recipe.engine.weight_transfer == "adapters":
            assert adapters is not None, "checked with the recipe"
            adapters.save(path)
        else:
            save_policy(path, model, tokenizer, adapters, readable)

    return weight_transfer(recipe, tensors, save, directory, device, stored_parts(model))


def weight_transfer(
    recipe: Recipe,
    tensors: TensorSource,
    save: Callable[[Path], object],
    directory: Path,
    device: torch.device,
    parts: Parts,
    exports: Exports | None = None,
) -> WeightTransfer:
    """Return the recipe's weight transfer to an engine that has its own copy.

    Args:
        tensors: iterates over the policy's tensors, which are on `device`.
        save: writes the policy, or only its adapters, into a folder.
        directory: the run's directory.
        parts: names and shapes of the tensors' parts for engines other than the embedded one.
        exports: yields the tensors on every rank's GPU, for servers that read them there; by default from `tensors`.
    """
    settings = recipe.engine
    if recipe.cluster.enabled and settings.engine == "embedded":
        from april.engines.ray.object_store import ObjectStore

        return ObjectStore(tensors, getattr(torch, recipe.compute_dtype))
    if settings.own_process:
        return OnDisk(directory / "weights", lambda path: _save_tensors(path, tensors()))
    if settings.engine == "embedded":
        return InProcess(tensors)

    # vLLM and SGLang load tensors by their names in files, which differ for mixtures of experts.
    def stored() -> Iterator[tuple[str, Tensor]]:
        return cut(tensors(), parts)

    if settings.engine == "vllm-inproc":
        return InProcess(stored)
    if settings.weight_transfer == "ipc":
        from april.engines.cuda_ipc import exports_of
        from april.engines.servers.same_device import SameDevice

        return SameDevice(exports or functools.partial(exports_of, stored, device))
    if settings.weight_transfer != "broadcast":
        return OnDisk(directory / "weights", save)
    from april.engines.servers.broadcast import Broadcast

    backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
    return Broadcast(stored, backend, settings.broadcast_address, settings.broadcast_interface)


def _save_tensors(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, directory / "model.safetensors")
