"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: few parameters are trained, engines get whole weights.

Invariants:
- the parameters of the policy it started from never change;
- merging makes new tensors and touches none that are trained, so a run is the same however often it hands weights over;
- merged weights have the names and shapes of the policy without adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
            task_type="CAUSAL_LM",
        )
        try:
            self._wrapped: Any = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora.target_modules = {settings.target_modules}: {error}") from None
        self._model = model

    def disabled(self) -> AbstractContextManager[None]:
        """Inside, the model computes what it computed before it had adapters."""
        context: AbstractContextManager[None] = self._wrapped.disable_adapter()
        return context

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight of each parameter of the policy, adapters added in, one at a time."""
        modules = dict(self._model.named_modules())
        for name, parameter in self._model.named_parameters():
            if "lora_" in name:
                continue
            owner, adapted, kind = name.rpartition(".base_layer.")
            if not adapted:
                yield name, parameter.detach()
            elif kind == "weight":
                delta = modules[owner].get_delta_weight("default")
                yield f"{owner}.weight", (parameter + delta.to(parameter.dtype)).detach()
            else:
                yield f"{owner}.{kind}", parameter.detach()

    def merged_model(self) -> Any:
        """A model without adapters that computes the same; what no adapter changes it shares with the trained one."""
        shared = {
            id(p): p for name, p in self._model.named_parameters() if "lora_" not in name and "base_layer" not in name
        }
        return copy.deepcopy(self._wrapped, shared).merge_and_unload()

    def save(self, directory: Path) -> None:
        """Write the adapters alone, as peft reads them."""
        self._wrapped.save_pretrained(directory)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._model.named_parameters() if "lora_" in name}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        own = self.state_dict()
        if own.keys() != state.keys() or any(own[name].shape != tensor.shape for name, tensor in state.items()):
            raise ValueError(
                "lora: the checkpoint's adapters are of other settings: resume with the rank it was begun with"
            )
        for name, tensor in state.items():
            own[name].copy_(tensor)
