"""Names and parts under which a model's tensors are stored, if they differ from those that transformers computes with.

For a mixture of experts, transformers computes with one tensor of all experts' gates and projections, while files on
the hub, and engines that load them, have one matrix per expert.

Invariant: a tensor is the concatenation of its parts, which are written together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from april.training.lora import plain_name

Parts = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Names and shapes of the parts, in order, of each tensor that is stored in parts, by its name."""


def stored_parts(model: Any) -> Parts:
    """Return the parts of the tensors of a transformers model that are stored as slices."""
    found = {}
    for adapted, parameter in model.named_parameters():
        name = plain_name(adapted)
        if parameter.dim() > 2 and (parts := _parts(model, name, tuple(parameter.shape))):
            found[name] = parts
    return found


def _parts(model: Any, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Return the parts of a tensor, found by converting a tensor of row numbers with transformers."""
    # Row numbers instead of weights show which rows each part takes, for a conversion that is unknown here.
    rows = torch.arange(torch.Size(shape[:-1]).numel()).reshape(*shape[:-1], 1)
    cut = revert_weight_conversion(model, {name: rows})
    parts = dict(sorted(cut.items(), key=lambda part: int(part[1].flatten()[0])))
    if list(parts) == [name] or not torch.equal(torch.cat([part.flatten() for part in parts.values()]), rows.flatten()):
        return {}
    return {part: (*numbers.shape[:-1], shape[-1]) for part, numbers in parts.items()}


def cut(tensors: Iterable[tuple[str, Tensor]], parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of whole tensors under their stored names."""
    for name, tensor in tensors:
        if name not in parts:
            yield name, tensor
            continue
        rows, begin = tensor.reshape(-1, tensor.shape[-1]), 0
        for part, shape in parts[name].items():
            end = begin + torch.Size(shape[:-1]).numel()
            yield part, rows[begin:end].reshape(shape)
            begin = end
