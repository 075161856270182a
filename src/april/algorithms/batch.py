"""From complete groups to tensors: the one place that turns tokens into a training batch.

Invariants:
- the ids trained on are the ids that were sampled, with the log-probability and the policy version of each;
- rows cut out of a batch hold what they held in it;
- padding is on the right, where causal attention never lets it reach a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from april.rollout.trajectory import ENVIRONMENT, Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as rows, the shorter ones padded on the right, and what training knows of each of their tokens.

    In an array [B, T - 1], position t is about the token at position t + 1, which logits at t predict.
    """

    input_ids: Tensor
    """Prompt and response, [B, T]."""
    lengths: tuple[int, ...]
    """Tokens of each row without padding, [B]."""
    mask: Tensor
    """True where the next token was sampled by a policy and is trained on, [B, T - 1]."""
    behaviour: Tensor
    """Behaviour log-probability of the next token, [B, T - 1]; 0 where no policy sampled it."""
    ages: Tensor
    """Weight updates between the next token and this step, [B, T - 1]; 0 where no policy sampled it."""
    advantages: Tensor | None = None
    """Advantage of each row, [B], or of each token, [B, T - 1]."""
    prox: Tensor | None = None
    """Log-probability under the policy as the training step began, [B, T - 1]."""
    reference: Tensor | None = None
    """Log-probability under the reference policy, [B, T - 1]."""
    values: Tensor | None = None
    """The critic's estimate before the next token, as the training step began, [B, T - 1]."""
    returns: Tensor | None = None
    """What the critic is to estimate, [B, T - 1]."""

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, samples: Sequence[Sample], version: int) -> Batch:
        """All of `samples`, in order, on the CPU; ages count from the policy `version` of the training step."""
        lengths = tuple(len(sample.prompt_ids) + sample.length for sample in samples)
        shape = (len(samples), max(lengths, default=1))
        input_ids = np.zeros(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        behaviour = np.zeros(shape, dtype=np.float32)
        ages = np.zeros(shape, dtype=np.int64)
        for row, sample in enumerate(samples):
            prompt, end = len(sample.prompt_ids), lengths[row]
            versions = sample.versions
            sampled = versions != ENVIRONMENT
            input_ids[row, :prompt] = sample.prompt_ids
            input_ids[row, prompt:end] = sample.response_ids
            mask[row, prompt:end] = sampled
            behaviour[row, prompt:end] = np.where(sampled, sample.logprobs, 0)
            ages[row, prompt:end] = np.where(sampled, version - versions, 0)
        return cls(
            torch.from_numpy(input_ids),
            lengths,
            torch.from_numpy(mask[:, 1:]),
            torch.from_numpy(behaviour[:, 1:]),
            torch.from_numpy(ages[:, 1:]),
        )

    def rows(self, indices: Sequence[int], device: torch.device | str = "cpu") -> Batch:
        """Some of the rows, as wide as the longest of them."""
        index = torch.tensor(indices, dtype=torch.long)
        lengths = tuple(self.lengths[i] for i in indices)
        width = max(lengths, default=1)

        def cut(tensor: Tensor) -> Tensor:
            picked = tensor[index]
            return (picked if picked.dim() == 1 else picked[:, : width - 1]).to(device)

        chosen: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor) and name != "input_ids":
                chosen[name] = cut(value)
        return Batch(input_ids=self.input_ids[index, :width].to(device), lengths=lengths, **chosen)
