"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: few parameters are trained, engines compute with whole weights.

Invariants:
- the parameters of the policy it started from never change;
- merging makes new tensors and touches none that are trained, so a run is the same however often it hands weights over;
- merged weights have the names and shapes of the policy without adapters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from april.config.error import ConfigError
from april.config.settings import LoraSettings


class Adapters:
    """Puts adapters into `model`, in place; they alone require gradients from then on.

    Args:
        model: a Hugging Face causal LM; it stays of its own class.
        settings: with a rank above 0.

    Raises:
        ConfigError: the model has no such modules.
    """

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.scale_alpha,
            target_modules=list(settings.target_modules) or "all-linear",
            exclude_modules=None if settings.target_modules else _of_other_kinds(model),
            task_type="CAUSAL_LM",
        )
        try:
            self._wrapped: Any = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora.target_modules = {settings.target_modules}: {error}") from None
        self._model = model
        if _has_adapter(model.get_output_embeddings()) and _tied(model):
            raise ConfigError(
                f"lora.target_modules = {settings.target_modules}: the head's weights are those of the embedding: name "
                "the embedding instead, which adapts both"
            )
        begun = model.name_or_path
        if begun and Path(begun).is_dir():  # who loads the adapters may be in another directory
            config.base_model_name_or_path = str(Path(begun).absolute())

    @classmethod
    def of(cls, wrapped: Any) -> Self:
        """Those that a peft model has already: LoRA of any settings but DoRA, and nothing else trained."""
        adapters = cls.__new__(cls)
        adapters._wrapped, adapters._model = wrapped, wrapped.get_base_model()
        return adapters

    def disabled(self) -> AbstractContextManager[None]:
        """Inside, the model computes what it computed before it had adapters."""
        context: AbstractContextManager[None] = self._wrapped.disable_adapter()
        return context

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight of each parameter of the policy, adapters added in, one at a time."""
        return ((name, make()) for name, make in self.merging().items())

    def merging(self) -> dict[str, Callable[[], Tensor]]:
        """What makes each parameter of the policy, adapters added in, by its name."""
        layers: dict[str, list[Any]] = {}
        for name, module in self._model.named_modules():
            if _has_adapter(module):
                layers.setdefault(f"{plain_name(name)}.{_adapted(module)}", []).append(module)
        return {
            plain: functools.partial(_merged, parameter, layers[plain]) if plain in layers else parameter.detach
            for name, parameter in self._model.named_parameters()
            if "lora_" not in name and (plain := plain_name(name))
        }

    def stored(self) -> dict[str, Tensor]:
        """Return what a checkpoint of the policy without adapters holds: merged parameters and stored buffers."""
        stored = self._model.state_dict()
        buffers = {plain_name(name): own for name, own in self._model.named_buffers() if name in stored}
        return {**dict(self.merged()), **buffers}

    def merged_model(self) -> Any:
        """A model without adapters that computes the same; what no adapter changes it shares with the trained one."""
        shared = {
            id(p): p for name, p in self._model.named_parameters() if "lora_" not in name and "base_layer" not in name
        }
        return copy.deepcopy(self._wrapped, shared).merge_and_unload()

    def save(self, directory: Path, writes: bool = True, masters: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """Write the adapters alone, as peft reads them.

        Args:
            writes: of ranks, which all have to call this, one does.
            masters: gives the tensor to write for each parameter.
        """
        named = {name: masters(own).detach() for name, own in self._wrapped.state_dict(keep_vars=True).items()}.items()
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named if "lora_" in n}
        if writes:
            self._wrapped.save_pretrained(directory, state_dict=whole)

    def state_dict(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """Adapters by name; with `keep_vars` the parameters themselves."""
        named = self._model.named_parameters()
        return {name: p if keep_vars else p.detach() for name, p in named if "lora_" in name}


def _of_other_kinds(model: Any) -> list[str] | None:
    """Return the names of linear layers that compute something else, such as Phi-MoE's routers."""
    linear = ((name, type(module)) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, kind in linear if kind.forward is not nn.Linear.forward] or None


def plain_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the policy without adapters."""
    return name.replace(".base_layer", "")


def head_weight(model: Any) -> Tensor:
    """Return the weight [V, D] of a model's head, adapters added in; a head tied to an embedding follows its adapter.

    A head is computed from its weight, a chunk at a time, and not called: its own adapter would have no effect.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layer = embedding if _tied(model) else head
    weight: Tensor = head.weight
    if not _has_adapter(layer) or layer.disable_adapters:
        return weight
    delta: Tensor = layer.get_delta_weight("default").to(weight.dtype)
    return weight + delta


def _tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _has_adapter(layer: Any) -> bool:
    return hasattr(layer, "lora_A")


def _adapted(layer: Any) -> str:
    """Return the name of the parameter that a layer's adapter adds to; layers of several are nested."""
    return getattr(layer, "parameter_name", "weight")


@torch.no_grad()
def _merged(base: Tensor, layers: list[Any]) -> Tensor:
    merged: Any = base
    for layer in layers:
        merged = merged + layer.get_delta_weight("default").to(base.dtype)
    whole: Tensor = merged.redistribute(placements=base.placements) if isinstance(base, DTensor) else merged
    return whole
