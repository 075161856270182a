"""Comparison of one of april's attention functions with a model's own attention.

Invariants:
- the comparison is in float32 whatever the model's type, so that a wrong result is not mistaken for rounding;
- sequences are longer than the model's sliding windows, and not all begin at position 0 of the row;
- the model is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from april.engines.text_attention import set_text_attention, text_attention

LENGTHS = (13, 6, 5)
"""Lengths of the probe's sequences, in tokens."""
WINDOW = 4
"""Length of sliding windows, and of chunks of chunked attention, during a probe: real ones need long sequences."""
TOLERANCE = 1e-4
"""Largest difference, relative to the norm, that rounding explains: tiny models of 74 architectures are below 1e-6."""

_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Names of windows in configurations, as transformers' mask functions read them, and in layers."""
_EXPECTED: dict[str, Any] = {"dropout": 0.0, "is_causal": True}
_WITHOUT_EFFECT = {
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Refuse arguments of a layer that change what attention computes.

    Args:
        arguments: arguments for which the attention function has no parameter.

    Raises:
        TypeError: an argument is neither None nor known to be without effect.
    """
    for name, value in arguments.items():
        known = name in _WITHOUT_EFFECT or (name in _EXPECTED and value == _EXPECTED[name])
        if value is not None and not known:
            shown = f" = {value}" if isinstance(value, bool | int | float | str) else ""
            raise TypeError(f"its attention takes {name}{shown}, which april's attention does not support")


@torch.no_grad()
def agrees(model: Any, alone: Callable[[Tensor], Tensor], packed: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether sequences that share a row give the same results as each sequence alone.

    Args:
        alone: maps token ids [1, length] to outputs [length, D] by the model's own attention.
        packed: maps token ids and positions, [1, tokens] each, to outputs [tokens, D] by the attention under test.
    """
    device = next(model.parameters()).device
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    sequences = [(torch.arange(1, 1 + n, device=device) * 7 % vocabulary)[None] for n in LENGTHS]
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
    with in_float32(model):
        implementation = text_attention(model)
        set_text_attention(model, "eager")
        try:
            expected = torch.cat([alone(ids) for ids in sequences]).float()
        finally:
            set_text_attention(model, implementation)
        difference = (packed(torch.cat(sequences, 1), positions).float() - expected).norm()
    return bool(difference <= TOLERANCE * expected.norm())


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """Within the context, the model's windows are shorter than the probe's sequences."""
    configs = (getattr(module, "config", None) for module in model.modules())
    owners = {id(owner): owner for owner in (*model.modules(), *configs)}
    found = [
        (owner, name, value)
        for owner in owners.values()
        for name in _WINDOWS
        if type(value := getattr(owner, name, None)) is int
    ]
    for owner, name, value in found:
        setattr(owner, name, min(value, WINDOW))
    try:
        yield
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within the context, the model computes in float32. Only one layer at a time is converted."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    within = {id(module) for layer in layers for module in layer.modules()}
    outside = _Widening([module for module in model.modules() if id(module) not in within])
    hooks = []
    for layer in layers:
        widening = _Widening(list(layer.modules()))
        hooks.append(layer.register_forward_pre_hook(widening.widen))
        # always_call: the layer is restored also if its forward pass raises.
        hooks.append(layer.register_forward_hook(widening.restore, always_call=True))
    outside.widen()
    # TF32 would exceed `TOLERANCE` without any error in the attention.
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        outside.restore()
        for hook in hooks:
            hook.remove()


class _Widening:
    """Replaces parameters and buffers in half precision by float32 copies, and restores them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._narrow: list[tuple[dict[str, Any], str, Tensor]] = [
            (held, name, tensor)
            for module in modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16)
        ]

    def widen(self, *_: Any) -> None:
        # One copy for each tensor, so that tied parameters stay tied.
        wide = {id(tensor): tensor.detach().float() for _, _, tensor in self._narrow}
        for held, name, tensor in self._narrow:
            own = wide[id(tensor)]
            held[name] = nn.Parameter(own, requires_grad=False) if isinstance(tensor, nn.Parameter) else own

    def restore(self, *_: Any) -> None:
        for held, name, tensor in self._narrow:
            held[name] = tensor
