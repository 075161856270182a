"""Bytes of activations, counted in a forward pass of modules whose tensors have shapes but no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from april.training.local import checkpoint_layers
from april.training.model_parallel import layers_of


def activation_bytes(
    trunk: Any, part: nn.Module, forward: Callable[[], Tensor], computed: int, checkpointing: bool, more: int = 0
) -> int:
    """Return the bytes that a forward pass keeps for its backward pass; with checkpointing, one layer's.

    Args:
        trunk: the model without its head.
        part: the modules of it that `forward` computes, all of whose parameters are trained.
        forward: computes the hidden states behind the last layer.
        computed: bytes of an element in training.
        more: elements per layer in addition to those that autograd keeps.
    """
    part.requires_grad_(True)
    layers = len(layers_of(part))
    whole, hidden = _saved(part, forward)
    whole += layers * more * hidden.element_size()
    scale = computed / hidden.element_size()
    if not checkpointing or not layers:
        return int(whole * scale)
    checkpoint_layers(trunk)
    outside, _ = _saved(part, forward)
    # The name in older versions of transformers, as in `checkpoint_layers`.
    disable = getattr(trunk, "activation_checkpointing_disable", None) or trunk.gradient_checkpointing_disable
    disable()
    # Checkpointing keeps one input per layer outside autograd's saved tensors and recomputes a layer at a time.
    one_layer = (whole - outside) // layers
    return int((outside + layers * hidden.nbytes + one_layer) * scale)


def layer_bytes(config: Any, tokens: int, computed: int) -> int:
    """Return the bytes of a layer's activations in a forward pass without gradients.

    Args:
        config: configuration of the text layers, or of a vision tower.
        tokens: number of tokens, or of patches.
    """
    width = 6 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return int(tokens * width * computed)


def _saved(part: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Return the bytes that a forward pass saves for the backward pass, without parameters, and its hidden states."""
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        # By storage: views of one tensor are saved repeatedly but take memory once.
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    own = {parameter.untyped_storage()._cdata for parameter in part.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = forward()
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own), hidden
