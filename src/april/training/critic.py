"""The value function of PPO: what reward is to be expected from each state.

Invariant: the critic shares no parameter with the policy, so its loss never moves the policy, nor any engine that
shares the policy's parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from april.algorithms.batch import Batch
from april.images.model_inputs import ModelImages
from april.images.store import ImageStore
from april.training.forward import hidden_states
from april.training.policy import trunk_of


class Critic(nn.Module):
    """Value model: a trunk initialised from the policy's, and a linear head initialised to 0.

    Args:
        model: the policy, a Hugging Face causal LM.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        weight = model.get_output_embeddings().weight
        self.trunk = copy.deepcopy(trunk_of(model)).requires_grad_(True)
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.images: ModelImages | None = None

    def take_images(self, images: ImageStore, together: bool = False) -> None:
        """Compute images of prompts with the critic's trunk; see `ModelImages`."""
        self.images = ModelImages(self.trunk, images, together=together)

    def forward(self, batch: Batch) -> Tensor:
        """Return the value before each trained token, [B, T - 1] in float32; 0 outside the mask."""
        values = self.head(hidden_states(self.trunk, batch, images=self.images)).squeeze(-1).float()
        return torch.zeros(batch.mask.shape, device=batch.mask.device).masked_scatter(batch.mask, values)
