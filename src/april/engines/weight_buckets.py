"""Buckets of weights: tensors that are announced and sent together.

Invariant: tensors of wider types come first in a bucket, so that each is aligned if their bytes stand without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from april.engines.weight_transfer import Bucket


def buckets_of(tensors: Iterator[tuple[str, Tensor]], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in buckets of at most `most` bytes, the wider types of a bucket first: each tensor is
    aligned."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most:
            yield by_width(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield by_width(bucket)


def by_width(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the tensors, wider types first."""
    return sorted(tensors, key=lambda named: -named[1].itemsize)


def bucket_of(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """Return names, types and shapes of tensors."""
    return Bucket(
        [name for name, _ in tensors],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        [list(tensor.shape) for _, tensor in tensors],
    )


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one tensor after the other without gaps."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]
