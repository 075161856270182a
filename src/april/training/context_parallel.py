"""A packed row whose tokens are dealt out over ranks: context parallelism, for responses that are long for one rank.

Each rank runs the layers over its share of the tokens. Attention alone needs all tokens of a sequence: there the ranks
exchange tokens for heads, so that each has all tokens of some heads, and back (Ulysses, arXiv 2309.14509).

Invariants:
- the ranks of a group are given the same batch, and compute the same scores and the same loss of it;
- so every gradient, summed over the group, is as many times that of the loss as the group has ranks: the trunk's by the
  backward of `ContextParallel.whole`, the head's because each rank computes it. Whoever sums gradients divides by that.
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
    """This rank's place among those that share a row.

    Args:
        group: their process group.
        rank: this one's number in it.
        size: how many they are.
    """

    group: Any
    rank: int
    size: int

    def own(self, row: Tensor) -> Tensor:
        """This rank's tokens of `row`, [1, tokens]; their number is a multiple of `size`."""
        return row.chunk(self.size, 1)[self.rank]

    def whole(self, own: Tensor) -> Tensor:
        """All tokens, of what each rank has of them: [tokens / size, D] to [tokens, D]."""
        whole: Tensor = _Whole.apply(own, self)  # type: ignore[no-untyped-call]
        return whole

    def heads(self, tensor: Tensor) -> Tensor:
        """Some tokens of all heads for all tokens of some: [1, H, T / size, D] to [1, H / size, T, D]."""
        _, heads, tokens, width = tensor.shape
        parts = self._exchange(tensor[0].reshape(self.size, heads // self.size, tokens, width))
        return parts.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, width)

    def tokens(self, tensor: Tensor) -> Tensor:
        """Back: [1, T, H / size, D] to [1, T / size, H, D]."""
        _, tokens, heads, width = tensor.shape
        parts = self._exchange(tensor[0].reshape(self.size, tokens // self.size, heads, width))
        return parts.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, width)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of [size, ...] to rank i, for one of each."""
        exchanged: Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchange(torch.autograd.Function):
    """Each rank's part i goes to rank i; what comes back in the backward pass goes the other way."""

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
    """Gathers tokens. Backward: the sum over ranks of a gradient that is the same on each."""

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
    """Inside, packed rows are shared by the ranks of `context`; by none if it is None."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context_parallel() -> ContextParallel | None:
    """The ranks that share packed rows here."""
    return _current.get()
