"""Weight transfer from the trained policy to the engine of a recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from april.config.settings.engine_settings import EngineSettings
from april.engines.weight_transfer import InProcess, OnDisk, SharedParameters, TensorSource, WeightTransfer
from april.training.lora import Adapters
from april.training.offload import Readable, identity
from april.training.policy import save_policy
from april.training.stored_names import Parts, cut, stored_parts, stored_sources

if TYPE_CHECKING:
    from april.engines.servers.same_device import Exports


def shares_process(engine: EngineSettings, cluster_dtype: torch.dtype | None) -> bool:
    """Return whether the embedded engine works in the trainer's process."""
    return engine.engine == "embedded" and not engine.own_process and cluster_dtype is None


def model_transfer(
    engine: EngineSettings,
    model: Any,
    tokenizer: Any,
    directory: Path,
    adapters: Adapters | None = None,
    readable: Readable = identity,
    cluster_dtype: torch.dtype | None = None,
) -> WeightTransfer:
    """Return the weight transfer from a model in this process to an engine.

    Args:
        directory: the run's directory; weights for servers go to its folder `weights`.
        adapters: the model's adapters; they are merged here or by the engine.
        readable: maps a parameter to its values, which may be in host memory.
        cluster_dtype: type in which engines on a Ray cluster get the weights; None without a cluster.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        return ((name, make()) for name, make in stored_sources(model, adapters, readable).items())

    if shares_process(engine, cluster_dtype):
        # With adapters the engine has a merged copy, which each update has to fill.
        return InProcess(tensors) if adapters else SharedParameters()
    device = next(model.parameters()).device

    def save(path: Path) -> None:
        if engine.weight_transfer == "adapters":
            assert adapters is not None, "checked with the recipe"
            adapters.save(path)
        else:
            save_policy(path, model, tokenizer, adapters, readable)

    return weight_transfer(engine, tensors, save, directory, device, stored_parts(model), cluster_dtype=cluster_dtype)


def weight_transfer(
    settings: EngineSettings,
    tensors: TensorSource,
    save: Callable[[Path], object],
    directory: Path,
    device: torch.device,
    parts: Parts,
    exports: Exports | None = None,
    cluster_dtype: torch.dtype | None = None,
) -> WeightTransfer:
    """Return the weight transfer to an engine that has its own copy.

    Args:
        tensors: iterates over the policy's tensors, which are on `device`.
        save: writes the policy, or only its adapters, into a folder.
        directory: the run's directory.
        parts: names and shapes of the tensors' parts for engines other than the embedded one.
        exports: yields the tensors on every rank's GPU, for servers that read them there; by default from `tensors`.
    """
    if cluster_dtype is not None and settings.engine == "embedded":
        from april.engines.ray.object_store import ObjectStore

        return ObjectStore(tensors, cluster_dtype)
    if settings.own_process:
        return OnDisk(directory / "weights", lambda path: _save_tensors(path, tensors()))
    if settings.engine == "embedded":
        return InProcess(tensors)

    # vLLM and SGLang load tensors by their names in files, which differ for mixtures of experts.
    def stored() -> Iterator[tuple[str, Tensor]]:
        return cut(tensors(), parts)

    if settings.engine == "vllm-inproc":
        return InProcess(stored)
    disk = OnDisk(directory / "weights", save)
    if settings.weight_transfer == "ipc":
        from april.engines.cuda_ipc import exports_of
        from april.engines.servers.same_device import SameDevice

        return SameDevice(exports or functools.partial(exports_of, stored, device), disk)
    if settings.weight_transfer != "broadcast":
        return disk
    from april.engines.servers.broadcast import Broadcast

    backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
    return Broadcast(stored, backend, settings.broadcast_address, settings.broadcast_interface)


def _save_tensors(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, directory / "model.safetensors")
