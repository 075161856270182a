"""Memory that a real forward pass keeps for its backward pass, to compare plans with."""

from __future__ import annotations

import torch

from april.algorithms.batch import Batch
from april.training.local import LocalLearner


def saved_bytes(learner: LocalLearner, batch: Batch) -> int:
    """Return the bytes of tensors that the policy's packed pass of a batch saves, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in learner.model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with learner.packed(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.policy(batch)
    return sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own)
