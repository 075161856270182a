"""What a model's tensors are called, and cut into, where they are stored, if not as transformers computes with them.

Of a mixture of experts transformers computes with one tensor of all experts' gates and projections, where files on the
hub, and engines that load them, have a matrix for each.

Invariant: the parts of a tensor lie in it one after the other and are all of it; who writes one writes the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from april.training.lora import plain_name

Parts = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Of each tensor that is stored otherwise, by its name: names and shapes of its parts, in their order."""


def stored_parts(model: Any) -> Parts:
    """The parts of the tensors of `model`, of transformers, as far as they are made by cutting alone."""
    found = {}
    for adapted, parameter in model.named_parameters():
        name = plain_name(adapted)
        if parameter.dim() > 2 and (parts := _parts(model, name, tuple(parameter.shape))):
            found[name] = parts
    return found


def _parts(model: Any, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Found by having transformers cut up a tensor that numbers its rows."""
    rows = torch.arange(torch.Size(shape[:-1]).numel()).reshape(*shape[:-1], 1)
    cut = revert_weight_conversion(model, {name: rows})
    parts = dict(sorted(cut.items(), key=lambda part: int(part[1].flatten()[0])))
    if list(parts) == [name] or not torch.equal(torch.cat([part.flatten() for part in parts.values()]), rows.flatten()):
        return {}
    return {part: (*numbers.shape[:-1], shape[-1]) for part, numbers in parts.items()}


def cut(tensors: Iterable[tuple[str, Tensor]], parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under the names, and in the parts, that they are stored in."""
    for name, tensor in tensors:
        if name not in parts:
            yield name, tensor
            continue
        rows, begin = tensor.reshape(-1, tensor.shape[-1]), 0
        for part, shape in parts[name].items():
            end = begin + torch.Size(shape[:-1]).numel()
            yield part, rows[begin:end].reshape(shape)
            begin = end
