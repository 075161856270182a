"""Log-probabilities and entropy with the vocabulary divided among ranks.

Invariants:
- results of a reduction are equal on all ranks, and all ranks compute the same loss from them, so gradients need no
  further reduction;
- logits exist for one chunk of positions at a time, and are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from april.algorithms.logprobs import CHUNK_ELEMENTS


def vocab_parallel_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    columns: tuple[int, int],
    group: Any,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and entropy (nats) under softmax(logits / temperature), [N] each, float32, on every rank.

    Args:
        head: computes this rank's logits, [n, D] to [n, columns], with the vocabulary's padding at the end.
        hidden: last hidden states, [N, D], equal on all ranks.
        targets: token ids, [N].
        columns: first token id of this rank's logits, and number of logits without padding.
        group: process group of the ranks that divide the vocabulary.
        temperature: positive; a number, or one per position, [N].
        chunk_size: positions whose logits are held at a time; None keeps them under `CHUNK_ELEMENTS`.
    """
    if not len(hidden):
        # An empty result that depends on `hidden`, so that the backward pass still reaches the layers.
        nothing = hidden.float().sum(-1)
        return nothing, nothing
    rows = chunk_size or max(1, CHUNK_ELEMENTS // max(columns[1], 1))
    settings = (head, columns, group)
    each = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(targets.shape)
    parts = [
        checkpoint(_scores, *settings, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(each.split(rows), hidden.split(rows), targets.split(rows), strict=True)
    ]
    logp, entropy = (torch.cat(of_chunks) for of_chunks in zip(*parts, strict=True))
    return logp, entropy


def _scores(
    head: Callable[[Tensor], Tensor],
    columns: tuple[int, int],
    group: Any,
    temperatures: Tensor,
    hidden: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    logp, entropy = _Scores.apply(head(hidden), targets, columns, group, temperatures)
    return logp, entropy


class _Scores(torch.autograd.Function):
    """Scores of a chunk of logits divided by columns; all ranks compute the same loss from the result."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, columns: tuple[int, int], group: Any, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, count = columns
        # In place, so that a chunk is held twice at most: its log-probabilities and their exponentials.
        shifted = logits.to(torch.float32, copy=True).div_(temperatures[:, None])
        # Padding gets weight 0. With -inf instead of the minimum, the weighted sum would contain 0 · -inf = NaN.
        shifted[:, count:] = torch.finfo(torch.float32).min
        largest = shifted.amax(-1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted -= largest
        here = (targets >= first) & (targets < first + count)
        column = torch.where(here, targets - first, 0)[:, None]
        weights = shifted.exp()
        chosen = torch.where(here, shifted.gather(-1, column)[:, 0], 0.0)
        sums = torch.stack([weights.sum(-1), torch.einsum("nv,nv->n", weights, shifted), chosen])
        dist.all_reduce(sums, group=group)
        total, weighted, target = sums
        entropy = total.log() - weighted / total
        ctx.save_for_backward(shifted.sub_(total.log()[:, None]), entropy, here, column)
        ctx.temperatures, ctx.dtype = temperatures, logits.dtype
        return target - total.log(), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        log_p, entropy, here, column = ctx.saved_tensors
        p = log_p.exp()
        # d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
        grad = log_p.add_(entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
        grad.addcmul_(p, grad_logp[:, None], value=-1)
        grad.scatter_add_(-1, column, torch.where(here, grad_logp, 0.0)[:, None])
        return grad.div_(ctx.temperatures[:, None]).to(ctx.dtype), None, None, None, None
