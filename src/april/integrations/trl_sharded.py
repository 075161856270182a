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
    model: the policy, whole still; the trainer shards this very module later (FSDP2).
    wanted: this process needs the copy.
    device: where the copy is to be; the model itself is still where it was loaded, which is the CPU.
    """

    def __init__(self, model: Any, wanted: bool, device: torch.device) -> None:
        self.model = model
        self.copy: Any = copy.deepcopy(model).requires_grad_(False).eval().to(device) if wanted else None

    def gather(self) -> None:
        """Called by all processes of the job."""
        own = {} if self.copy is None else dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                if own:
                    own[name.replace(WRAPPED, "")].copy_(whole)
