"""Context parallelism: the tokens of a packed row are distributed over ranks, for responses too long for one rank.

Each rank runs the layers on its share of the tokens. Attention needs all tokens of a sequence: before it, ranks
exchange tokens for heads, so that each rank has all tokens of some heads, and afterwards back (Ulysses, arXiv
2309.14509).

Invariants:
- the ranks of a group receive the same batch, and compute the same log-probabilities and the same loss;
- every gradient summed over the group is therefore the loss's gradient times the group's size: for the trunk because of
  the backward pass of `ContextParallel.whole`, for the head because each rank computes it. The code that sums gradients
  over ranks has to divide by the group's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ContextParallel:
    """The ranks that share a row, as one of them sees them.

    Args:
        group: process group of these ranks.
        rank: this rank's number in the group.
        size: number of ranks of the group.
    """

    group: Any
    rank: int
    size: int

    def own(self, row: Tensor) -> Tensor:
        """Return this rank's tokens of `row`, [1, tokens]; the number of tokens is a multiple of `size`."""
        return row.chunk(self.size, 1)[self.rank]

    def whole(self, own: Tensor) -> Tensor:
        """Gather the tokens of all ranks: [tokens / size, D] to [tokens, D]."""
        whole: Tensor = _Whole.apply(own, self)  # type: ignore[no-untyped-call]
        return whole

    def heads(self, tensor: Tensor) -> Tensor:
        """Exchange some tokens of all heads for all tokens of some heads: [1, H, T / size, D] to [1, H / size, T,
        D]."""
        _, heads, tokens, width = tensor.shape
        parts = self._exchange(tensor[0].reshape(self.size, heads // self.size, tokens, width))
        # Part i is from rank i, which has the i-th range of tokens, so concatenation restores the row's order.
        return parts.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, width)

    def tokens(self, tensor: Tensor) -> Tensor:
        """Reverse `heads`: [1, T, H / size, D] to [1, T / size, H, D]."""
        _, tokens, heads, width = tensor.shape
        parts = self._exchange(tensor[0].reshape(self.size, tokens // self.size, heads, width))
        return parts.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, width)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of [size, ...] to rank i; return the parts received."""
        exchanged: Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchange(torch.autograd.Function):
    """All-to-all of parts; its backward pass is the same exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        exchanged = torch.empty_like(parts)
        dist.all_to_all_single(exchanged, parts, group=group)
        return exchanged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


class _Whole(torch.autograd.Function):
    """All-gather of tokens. Its backward pass multiplies by the group's size: all ranks have equal gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        parts = [torch.empty_like(own) for _ in range(context.size)]
        dist.all_gather(parts, own.contiguous(), group=context.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context: ContextParallel = ctx.context
        return gradients[0].chunk(context.size)[context.rank] * context.size, None


_current: ContextVar[ContextParallel | None] = ContextVar("context", default=None)


@contextmanager
def context_parallel(context: ContextParallel | None) -> Iterator[None]:
    """Distribute packed rows over the ranks of `context` inside; not at all if it is None."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context_parallel() -> ContextParallel | None:
    """Return the ranks that share packed rows in the current block."""
    return _current.get()
