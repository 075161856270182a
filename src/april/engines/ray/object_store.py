"""Weight transfer through Ray's object store: weights are put once for all engines; each node fetches them once,
and its engines read them in place.

Invariant: weights stay in the store as long as an engine may be given them: as long as their `StoredWeights` is
referenced.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from april.engines.ray.head import wait_for_head
from april.engines.weight_transfer import TensorSource

BUCKET = 1 << 28
"""Minimum bytes of a bucket, except for the last one."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as bytes: numpy has no bfloat16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def tensor(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the memory is read-only, and so is its use
            return torch.from_numpy(self.data).view(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of one version, in the store. `size` in bytes."""

    buckets: list[ray.ObjectRef[list[Packed]]] = field(default_factory=list)
    size: int = 0

    async def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors with their names, once they are on this node."""
        buckets: list[list[Packed]] = await asyncio.gather(*self.buckets)
        return ((packed.name, packed.tensor()) for bucket in buckets for packed in bucket)


class ObjectStore:
    """A `WeightTransfer` to engines on a cluster.

    Args:
        source: gives the policy's tensors.
        dtype: compute type of the engines; weights are stored in it.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def offer(self, version: int) -> StoredWeights:
        """Put them into the store.

        Raises:
            EngineError: this node's part of the store hangs with the cluster's head.
        """
        refs: list[ray.ObjectRef[list[Packed]]] = []
        size = total = 0
        bucket: list[Packed] = []
        for name, tensor in self._source():
            value = tensor.detach().to("cpu", self._dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
            data = value.reshape(-1).view(torch.uint8).numpy()
            bucket.append(Packed(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), data))
            size += data.nbytes
            total += data.nbytes
            if size >= BUCKET:
                refs.append(wait_for_head(ray.put, bucket))
                bucket, size = [], 0
        return StoredWeights([*refs, wait_for_head(ray.put, bucket)], total)

    def withdraw(self) -> None:
        """Nothing to do: the stored weights are a copy."""
