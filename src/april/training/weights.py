"""How a policy that is trained here reaches the engine of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from april.config.recipe import Recipe
from april.engines.weights import InProcess, OnDisk, SharedParameters, WeightTransfer
from april.training.lora import Adapters
from april.training.policy import save_policy


def transfer_of(
    recipe: Recipe, model: Any, tokenizer: Any, directory: Path, adapters: Adapters | None = None
) -> WeightTransfer:
    """The way of the recipe.

    Args:
        directory: the run's directory; weights for servers go to its folder `weights`.
        adapters: those of the model, if it has any; they are merged in.
    """
    settings = recipe.engine

    def tensors() -> Iterator[tuple[str, Tensor]]:
        if adapters:
            return adapters.merged()
        return ((name, parameter.detach()) for name, parameter in model.named_parameters())

    if settings.engine == "embedded":
        return InProcess(tensors) if adapters else SharedParameters()
    if settings.engine == "vllm-inproc":
        return InProcess(tensors)
    if settings.weight_transfer == "disk":
        return OnDisk(directory / "weights", lambda path: save_policy(path, model, tokenizer, adapters))
    from april.engines.servers.broadcast import Broadcast

    backend: Literal["gloo", "nccl"] = "nccl" if next(model.parameters()).device.type == "cuda" else "gloo"
    return Broadcast(tensors, backend, settings.broadcast_address, settings.broadcast_interface)
