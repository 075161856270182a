"""From complete groups to tensors: the one place that turns tokens into a training batch.

Invariants:
- the ids trained on are the ids that were sampled, with the log-probability and the policy version of each;
- the micro-batches partition the samples they are made from, and each holds at most the token budget, padding included,
  unless it is a single sample;
- padding is on the right, where causal attention never lets it reach a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from april.trajectory import ENVIRONMENT, Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together, the shorter ones padded on the right.

    Position t of `mask`, `behaviour` and `ages` is about the token at position t + 1, which logits at t predict.
    """

    input_ids: Tensor
    """Prompt and response, [B, T]."""
    mask: Tensor
    """True where the next token was sampled by a policy, [B, T - 1]."""
    behaviour: Tensor
    """Behaviour log-probability of the next token, [B, T - 1]; 0 outside the mask."""
    ages: Tensor
    """Weight updates between the next token and this step, [B, T - 1]; 0 outside the mask."""
    advantages: Tensor
    """Advantage of each sample, [B]."""
    indices: tuple[int, ...]
    """Which of the samples these are."""


def micro_batches(
    samples: Sequence[Sample],
    advantages: Tensor,
    version: int,
    max_tokens: int,
    device: torch.device | str = "cpu",
    indices: Sequence[int] | None = None,
) -> Iterator[MicroBatch]:
    """Samples of like length together, so that little is padded, at most `max_tokens` at a time, longest first.

    Args:
        advantages: one per sample, [len(samples)].
        version: the policy version of the training step; ages count from it.
        max_tokens: B × T of a micro-batch at most.
        indices: which of the samples; all of them if None.
    """
    lengths = [len(sample.prompt_ids) + sample.length for sample in samples]
    order = sorted(range(len(samples)) if indices is None else indices, key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        rows = max(1, max_tokens // lengths[order[start]])
        part = tuple(order[start : start + rows])
        yield _pad([samples[i] for i in part], advantages[list(part)], part, version, device)
        start += rows


def _pad(
    samples: Sequence[Sample], advantages: Tensor, indices: tuple[int, ...], version: int, device: torch.device | str
) -> MicroBatch:
    width = max(len(sample.prompt_ids) + sample.length for sample in samples)
    shape = (len(samples), width)
    input_ids = np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=bool)
    behaviour = np.zeros(shape, dtype=np.float32)
    ages = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        prompt, end = len(sample.prompt_ids), len(sample.prompt_ids) + sample.length
        versions = sample.versions
        sampled = versions != ENVIRONMENT
        input_ids[row, :prompt] = sample.prompt_ids
        input_ids[row, prompt:end] = sample.response_ids
        mask[row, prompt:end] = sampled
        behaviour[row, prompt:end] = np.where(sampled, sample.logprobs, 0)
        ages[row, prompt:end] = np.where(sampled, version - versions, 0)
    return MicroBatch(
        torch.from_numpy(input_ids).to(device),
        torch.from_numpy(mask[:, 1:]).to(device),
        torch.from_numpy(behaviour[:, 1:]).to(device),
        torch.from_numpy(ages[:, 1:]).to(device),
        advantages.to(device),
        indices,
    )
