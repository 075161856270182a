"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: only adapters are trained, engines compute with merged weights.

Invariants:
- the parameters of the initial policy never change;
- merging makes new tensors and changes no trained tensor, so weight transfers do not influence a run;
- merged weights have the names and shapes of the policy without adapters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from april.config.error import ConfigError
from april.config.settings.lora_settings import LoraSettings
from april.training.offload import Readable, identity


class Adapters:
    """Adapters of a model. Constructing it adds them to `model` in place; afterwards only they require gradients.

    Args:
        model: a Hugging Face causal LM; its class stays the same.
        settings: adapter settings with a rank above 0.

    Raises:
        ConfigError: the model has no modules of the given names.
    """

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.scale_alpha,
            target_modules=list(settings.target_modules) or "all-linear",
            exclude_modules=[
                *([] if settings.target_modules else _of_other_kinds(model)),
                *outside_language_model(model, settings.target_modules),
            ]
            or None,
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
        if begun and Path(begun).is_dir():  # the adapters may be loaded from another working directory
            config.base_model_name_or_path = str(Path(begun).absolute())

    @classmethod
    def of(cls, wrapped: Any) -> Self:
        """Return the adapters of a peft model: LoRA of any settings except DoRA, and no other trained parameters."""
        adapters = cls.__new__(cls)
        adapters._wrapped, adapters._model = wrapped, wrapped.get_base_model()
        return adapters

    def disabled(self) -> AbstractContextManager[None]:
        """Disable the adapters inside."""
        context: AbstractContextManager[None] = self._wrapped.disable_adapter()
        return context

    def merged(self, readable: Readable = identity) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and merged weights of the policy's parameters."""
        return ((name, make()) for name, make in self.merging(readable).items())

    def merging(self, readable: Readable = identity) -> dict[str, Callable[[], Tensor]]:
        """Return functions that compute the merged weight of each parameter, by name.

        Args:
            readable: maps a parameter without adapter to its values, which may be in host memory.
        """
        layers: dict[str, list[Any]] = {}
        for name, module in self._model.named_modules():
            if _has_adapter(module):
                layers.setdefault(f"{plain_name(name)}.{_adapted(module)}", []).append(module)
        return {
            own: functools.partial(_merged, parameter, layers.get(own, []), readable)
            for name, parameter in self._model.named_parameters()
            if "lora_" not in name and (own := plain_name(name))
        }

    def merged_model(self) -> Any:
        """Return an equal model with merged adapters; it shares all parameters that no adapter changes."""
        shared = {
            id(p): p for name, p in self._model.named_parameters() if "lora_" not in name and "base_layer" not in name
        }
        # The memo of deepcopy contains parameters by id: deepcopy shares these instead of copying them.
        return copy.deepcopy(self._wrapped, shared).merge_and_unload()

    def save(self, directory: Path, writes: bool = True, masters: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """Write the adapters in peft's format.

        Args:
            writes: whether this rank writes; all ranks have to call this.
            masters: maps each parameter to the tensor to write.
        """
        named = {name: masters(own).detach() for name, own in self._wrapped.state_dict(keep_vars=True).items()}.items()
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named if "lora_" in n}
        if writes:
            self._wrapped.save_pretrained(directory, state_dict=whole)

    def state_dict(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """Return the adapters' tensors by name; with `keep_vars` the parameters themselves."""
        named = self._model.named_parameters()
        return {name: p if keep_vars else p.detach() for name, p in named if "lora_" in name}


def outside_language_model(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the names of modules outside the language model, except for those that a target names and that none of
    the language model's modules has: the vision tower has adapters only if it is named."""
    text = getattr(model.base_model, "language_model", None)
    if text is None:
        return []
    own, trunk = set(text.modules()), set(model.base_model.modules())
    parts = [(name, module in own) for name, module in model.named_modules() if module in trunk]

    named = [target for target in targets if not any(of_text and is_target(name, [target]) for name, of_text in parts)]
    return [
        name
        for name, of_text in parts
        if not (of_text or any(model.get_submodule(name).children()) or is_target(name, named))
    ]


def is_target(name: str, targets: Iterable[str]) -> bool:
    """Whether a target names the module `name`, by its whole name or by its end, as in peft."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _of_other_kinds(model: Any) -> list[str]:
    """Return the names of linear layers with another forward method, such as Phi-MoE's routers."""
    linear = ((name, type(module)) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, kind in linear if kind.forward is not nn.Linear.forward]


def plain_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the policy without adapters."""
    return name.replace(".base_layer", "")


def head_weight(model: Any) -> Tensor:
    """Return the merged weight [V, D] of a model's head; a head tied to the embedding uses the embedding's adapter.

    april multiplies with the head's weight a chunk at a time and does not call the head, so its adapter must be merged.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layer = embedding if _tied(model) else head
    weight: Tensor = head.weight
    # The reference policy is computed with the adapters disabled.
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
def _merged(parameter: Tensor, layers: list[Any], readable: Readable) -> Tensor:
    base: Any = readable(parameter)
    merged = base
    for layer in layers:
        delta = layer.get_delta_weight("default").to(base.dtype)
        # A base in host memory is merged on the adapters' device, one parameter at a time.
        merged = merged.to(delta.device) + delta
    # A sum of DTensors may have another placement; files and transfers expect the placement of the base.
    whole: Tensor = merged.redistribute(placements=base.placements) if isinstance(base, DTensor) else merged
    return whole
