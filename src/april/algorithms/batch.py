"""Conversion of complete groups into the tensors of a training batch. No other module does this.

Invariants:
- training sees exactly the sampled token ids, each with its recorded log-probability and policy version;
- rows selected from a batch keep their values;
- padding is on the right, so with causal attention it never influences a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from april.rollout.trajectory.features import Feature
from april.rollout.trajectory.routes import Experts
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.segment import ENVIRONMENT


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as rows, padded on the right, with per-token data for training.

    In an array [B, T - 1], position t describes the token at position t + 1, which the logits at t predict.
    """

    input_ids: Tensor
    """Prompt and response, [B, T]."""
    lengths: tuple[int, ...]
    """Number of tokens of each row without padding, [B]."""
    mask: Tensor
    """True where a policy sampled the next token and the token is trained on, [B, T - 1]."""
    rollout_logprobs: Tensor
    """Log-probability of the next token under the policy that sampled it, [B, T - 1]; 0 for environment tokens."""
    token_staleness: Tensor
    """Weight updates between sampling the next token and this step, [B, T - 1]; 0 for environment tokens."""
    advantages: Tensor | None = None
    """Advantage of each row, [B], or of each token, [B, T - 1]."""
    proximal_logprobs: Tensor | None = None
    """Log-probability under the policy at the start of the training step, [B, T - 1]."""
    reference_logprobs: Tensor | None = None
    """Log-probability under the reference policy, [B, T - 1]."""
    values: Tensor | None = None
    """Critic's estimate before the next token, at the start of the training step, [B, T - 1]."""
    returns: Tensor | None = None
    """Regression target of the critic, [B, T - 1]."""
    episodes: Tensor | None = None
    """Number of each row's episode in the batch, in the order of first rows, [B]; None: each row is an episode."""
    shares: Tensor | None = None
    """Share of each row in the trained tokens of its episode, [B]; None: each row is an episode."""
    routes: tuple[Experts | None, ...] | None = None
    """Experts of each row's tokens, [tokens, layers, top k], not copied from the sample; None for a row without any.
    None: the model's routers choose."""
    features: tuple[tuple[Feature, ...], ...] | None = None
    """Images of each row's prompt; None if no row has any."""
    temperatures: Tensor | None = None
    """Temperature that the next token was sampled at, [B, T - 1]; None: the policy's own everywhere."""

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, samples: Sequence[Sample], version: int, temperature: float = 1.0) -> Batch:
        """Build a batch of all `samples`, in order, on the CPU.

        Args:
            version: policy version that the training step starts from; staleness is relative to it.
            temperature: the policy's, at which tokens are scored unless the batch says otherwise.
        """
        lengths = tuple(len(sample.prompt_ids) + sample.length for sample in samples)
        shape = (len(samples), max(lengths, default=1))
        input_ids = np.zeros(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        rollout_logprobs = np.zeros(shape, dtype=np.float32)
        token_staleness = np.zeros(shape, dtype=np.int64)
        for row, sample in enumerate(samples):
            prompt, end = len(sample.prompt_ids), lengths[row]
            versions = sample.versions
            sampled = versions != ENVIRONMENT
            input_ids[row, :prompt] = sample.prompt_ids
            input_ids[row, prompt:end] = sample.response_ids
            mask[row, prompt:end] = sampled
            rollout_logprobs[row, prompt:end] = np.where(sampled, sample.logprobs, 0)
            token_staleness[row, prompt:end] = np.where(sampled, version - versions, 0)
        return cls(
            torch.from_numpy(input_ids),
            lengths,
            torch.from_numpy(mask[:, 1:]),
            torch.from_numpy(rollout_logprobs[:, 1:]),
            torch.from_numpy(token_staleness[:, 1:]),
            episodes=_episodes(samples),
            temperatures=_temperatures(samples, lengths, temperature),
            features=tuple(sample.features for sample in samples) if any(s.features for s in samples) else None,
        )

    def trained_temperatures(self, otherwise: float) -> float | Tensor:
        """Return the temperatures of the trained tokens in row order, [tokens], or `otherwise`."""
        return otherwise if self.temperatures is None else self.temperatures[self.mask]

    @property
    def episode_count(self) -> int:
        return len(self) if self.episodes is None else len(self.episodes.unique())

    def per_row(self, values: Tensor) -> Tensor:
        """Return a value of each row's episode, [episodes, ...] -> [B, ...]."""
        return values if self.episodes is None else values[self.episodes]

    def per_episode(self, values: Tensor) -> Tensor:
        """Return the sum over each episode's rows, [B] -> [episodes]."""
        if self.episodes is None:
            return values
        return values.new_zeros(self.episode_count).index_add_(0, self.episodes, values)

    def with_shares(self) -> Batch:
        """Return the batch, of whole episodes, with the rows' shares of their episodes' tokens as they are masked."""
        if self.episodes is None:
            return self
        tokens = self.mask.sum(-1)
        return replace(self, shares=tokens / self.per_row(self.per_episode(tokens)).clamp(min=1))

    def rows(self, indices: Sequence[int], device: torch.device | str = "cpu") -> Batch:
        """Select rows; the result is as wide as the longest of them."""
        index = torch.tensor(indices, dtype=torch.long)
        lengths = tuple(self.lengths[i] for i in indices)
        width = max(lengths, default=1)

        def cut(tensor: Tensor) -> Tensor:
            picked = tensor[index]
            # Advantages per sample have no token dimension to cut.
            return (picked if picked.dim() == 1 else picked[:, : width - 1]).to(device)

        chosen: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor) and name != "input_ids":
                chosen[name] = cut(value)
        for name in ("routes", "features"):
            if (held := getattr(self, name)) is not None:
                chosen[name] = tuple(held[i] for i in indices)
        return Batch(input_ids=self.input_ids[index, :width].to(device), lengths=lengths, **chosen)


def _temperatures(samples: Sequence[Sample], lengths: Sequence[int], policy: float) -> Tensor | None:
    # A sample that began before its run was resumed with another temperature keeps its own.
    requested = [sample.temperatures for sample in samples]
    if all(one is None for one in requested) and all(sample.scored_at == policy for sample in samples):
        return None
    temperatures = np.ones((len(samples), max(lengths)), dtype=np.float32)
    for row, (sample, one) in enumerate(zip(samples, requested, strict=True)):
        response = slice(len(sample.prompt_ids), lengths[row])
        temperatures[row, response] = sample.scored_at if one is None else one
    return torch.from_numpy(temperatures[:, 1:])


def _episodes(samples: Sequence[Sample]) -> Tensor | None:
    numbers: dict[tuple[int, int], int] = {}
    episodes = [numbers.setdefault((sample.group_id, sample.episode), len(numbers)) for sample in samples]
    return None if len(numbers) == len(samples) else torch.tensor(episodes)
