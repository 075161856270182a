"""Log-probabilities and entropy where each of some ranks has the logits of a part of the vocabulary.

Invariants:
- what leaves a reduction is the same on all ranks, and all that follows it is computed on each of them from the same
  numbers; so the gradient of a loss that all of them compute is right without reducing it again;
- logits are held for a chunk of positions, and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from april.algorithms.logprobs import CHUNK_ELEMENTS


def split_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    columns: tuple[int, int],
    group: Any,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy (nats) under softmax(logits / temperature), [N] each, float32, on every rank.

    Args:
        head: this rank's logits of hidden states, [n, D] to [n, columns], padding of the vocabulary at the end.
        hidden: last hidden states, [N, D], the same on all ranks.
        targets: token ids, [N].
        columns: the first token id of this rank's logits, and how many of them are no padding.
        group: the ranks that divide the vocabulary.
        temperature: positive.
        chunk_size: positions whose logits are held at a time; None keeps them under `CHUNK_ELEMENTS`.
    """
    if not len(hidden):
        nothing = hidden.float().sum(-1)
        return nothing, nothing
    rows = chunk_size or max(1, CHUNK_ELEMENTS // max(columns[1], 1))
    settings = (head, columns, group, temperature)
    parts = [
        checkpoint(_scores, *settings, states, ids, use_reentrant=False, preserve_rng_state=False)
        for states, ids in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    logp, entropy = (torch.cat(of_chunks) for of_chunks in zip(*parts, strict=True))
    return logp, entropy


def _scores(
    head: Callable[[Tensor], Tensor],
    columns: tuple[int, int],
    group: Any,
    temperature: float,
    hidden: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    first, count = columns
    logits = head(hidden).float() / temperature
    padding = torch.arange(logits.shape[-1], device=logits.device) >= count
    logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest
    weights = shifted.exp()
    here = (targets >= first) & (targets < first + count)
    chosen = shifted.gather(-1, torch.where(here, targets - first, 0)[:, None])[:, 0]
    own = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), torch.where(here, chosen, 0.0)])
    total, weighted, target = _Sum.apply(own, group)
    return target - total.log(), total.log() - weighted / total


class _Sum(torch.autograd.Function):
    """The sum over ranks, of which each computes the same loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
