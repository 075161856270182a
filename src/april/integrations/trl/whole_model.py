"""A policy that is sharded over the processes of a job, whole for who generates.

Invariant: each process that generates, or hands weights to servers, holds one whole copy beside its shard; it has the
weights that the policy had when all processes last called `gather`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

WRAPPED = "_checkpoint_wrapped_module."
"""What activation checkpointing puts into names."""


class WholeModel:
    """Args:
    model: the policy. The trainer shards this very module later (FSDP2, ZeRO), if it was not loaded in shards (ZeRO-3).
    wanted: this process needs the copy.
    device: where the copy is to be; the model itself is still where it was loaded, which is the CPU.
    """

    def __init__(self, model: Any, wanted: bool, device: torch.device) -> None:
        self.model = model
        self.copy: Any = _unsharded(model).requires_grad_(False).eval().to(device) if wanted else None

    def gather(self) -> None:
        """Called by all processes of the job."""
        own = {} if self.copy is None else dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if _is_partition(parameter):
                    import deepspeed

                    with deepspeed.zero.GatheredParameters([parameter]):
                        _keep(own, name, parameter)
                else:
                    _keep(own, name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)


def _keep(own: dict[str, torch.Tensor], name: str, whole: torch.Tensor) -> None:
    if own:
        own[name.replace(WRAPPED, "")].copy_(whole)


def _is_partition(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has taken it: then it is empty but while it is gathered."""
    return hasattr(parameter, "ds_id")


def _unsharded(model: Any) -> Any:
    """A module like `model` with parameters of its own; what they hold comes with the first `gather`."""
    if not any(map(_is_partition, model.parameters())):
        return copy.deepcopy(model)
    made = type(model)(copy.deepcopy(model.config))
    for own, theirs in zip(made.parameters(), model.parameters(), strict=True):
        own.data = own.data.to(theirs.dtype)
    made.load_state_dict(dict(model.named_buffers()), strict=False)
    made.generation_config = copy.deepcopy(model.generation_config)
    return made
