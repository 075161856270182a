"""Tensors of a policy that are stored in its files and sent to engines, and their names there.

For a mixture of experts, transformers computes with one tensor of all experts' gates and projections, while files on
the hub, and engines that load them, have one matrix per expert, and other names for some tensors.

Invariants:
- files and transfers contain the same tensors: all parameters without adapters, and the buffers of the state dict;
- a tensor is the concatenation of its parts, which are written together.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from april.training.lora import Adapters, plain_name
from april.training.offload import Readable, identity

Parts = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Names and shapes of the parts, in order, of each tensor that is stored in parts or under another name, by its
name."""


def stored_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that files of the policy contain, such as the biases of a router, by their names without
    adapters."""
    modules = ((f"{prefix}." if prefix else "", module) for prefix, module in model.named_modules())
    return {
        plain_name(prefix + name): buffer
        for prefix, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def stored_tensors(model: Any, readable: Readable = identity) -> dict[str, Tensor]:
    """Return the tensors whose shapes and types files and transfers have, without adapters, by their names in the
    model."""
    named = {plain_name(name): readable(p) for name, p in model.named_parameters() if "lora_" not in name}
    return named | stored_buffers(model)


def stored_sources(
    model: Any, adapters: Adapters | None = None, readable: Readable = identity
) -> dict[str, Callable[[], Tensor]]:
    """Return functions that make the tensors of files and transfers, adapters merged, by their names in the model.

    Args:
        readable: maps a parameter to its values, which may be in host memory.
    """
    named = {} if adapters else dict(model.named_parameters())
    # The parameters themselves, because master weights are found by parameter.
    own = {name: functools.partial(readable, parameter) for name, parameter in named.items()}
    buffers = {name: buffer.detach for name, buffer in stored_buffers(model).items()}
    return {**(adapters.merging(readable) if adapters else own), **buffers}


def stored_parts(model: Any) -> Parts:
    """Return the parts of the tensors of a transformers model that are stored as slices or under other names.

    Row numbers instead of weights show which rows each part takes, for conversions that are unknown here: transformers
    converts them as it converts weights that it saves.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    names, begins, numbers = list(shapes), [0], {}
    for name, shape in shapes.items():
        count = _rows(shape)
        own = torch.arange(begins[-1], begins[-1] + count, dtype=torch.int32)
        numbers[name] = own.reshape((*shape[:-1], 1) if shape else ())
        begins.append(begins[-1] + count)
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for part, rows in revert_weight_conversion(model, numbers).items():
        found.setdefault(names[bisect.bisect_right(begins, int(rows.flatten()[0])) - 1], []).append((part, rows))
    parts = {}
    for index, name in enumerate(names):
        of_name = sorted(found.get(name, ()), key=lambda part: int(part[1].flatten()[0]))
        if [part for part, _ in of_name] == [name]:
            continue
        joined = torch.cat([rows.flatten() for _, rows in of_name]) if of_name else torch.empty(0)
        if torch.equal(joined, torch.arange(begins[index], begins[index + 1], dtype=torch.int32)):
            parts[name] = {part: (*rows.shape[:-1], *shapes[name][-1:]) for part, rows in of_name}
    return parts


def _rows(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[:-1]).numel()


def cut(tensors: Iterable[tuple[str, Tensor]], parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of whole tensors under their stored names."""
    for name, tensor in tensors:
        if name not in parts:
            yield name, tensor
            continue
        rows, begin = tensor.reshape(_rows(tuple(tensor.shape)), -1), 0
        for part, shape in parts[name].items():
            end = begin + _rows(shape)
            yield part, rows[begin:end].reshape(shape)
            begin = end
