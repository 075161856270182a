"""A whole copy of a policy that is sharded over the processes of a job.

Invariant: each process that generates, or sends weights to servers, holds one whole copy and its shard. The copy has
the weights of the policy at the latest `gather`, which all processes call.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

WRAPPED = "_checkpoint_wrapped_module."
"""Prefix that activation checkpointing adds to parameter names."""


class WholeModel:
    """Args:
    model: the policy. The trainer shards this very module later (FSDP2, ZeRO), if it was not loaded in shards (ZeRO-3).
    wanted: whether this process needs the copy.
    device: device of the copy. The model itself is still on the CPU, where it was loaded.
    """

    def __init__(self, model: Any, wanted: bool, device: torch.device) -> None:
        self.model = model
        self.copy: Any = _unsharded(model).requires_grad_(False).eval().to(device) if wanted else None

    def gather(self) -> None:
        """Update the copy. All processes of the job call this together."""
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
    """Return whether ZeRO-3 has partitioned the parameter, which is then empty except while it is gathered."""
    return hasattr(parameter, "ds_id")


def _unsharded(model: Any) -> Any:
    """Return a module like `model` with its own parameters, which the first `gather` fills."""
    if not any(map(_is_partition, model.parameters())):
        return copy.deepcopy(model)
    # ZeRO-3 has emptied the parameters, so the module is built from its configuration instead of copied.
    made = type(model)(copy.deepcopy(model.config))
    for own, theirs in zip(made.parameters(), model.parameters(), strict=True):
        own.data = own.data.to(theirs.dtype)
    made.load_state_dict(dict(model.named_buffers()), strict=False)
    made.generation_config = copy.deepcopy(model.generation_config)
    return made
