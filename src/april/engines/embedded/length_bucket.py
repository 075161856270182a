"""Rows of the KV cache for sequences of similar length.

Invariants:
- `owners[r]` is the owner of row r; rows behind the last owner are free;
- the owners of the first `num_decoding` rows decode. The others are held: they prefill, wait or are paused. So decode
  attention reads views and gathers nothing, and a single long sequence makes attention longer in its own bucket only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from april.engines.embedded.kv_shape import KVShape


@dataclass(slots=True, eq=False, kw_only=True)
class RowOwner:
    """Owner of row `row` of `bucket`, which holds keys and values of its first `kv_length` tokens."""

    kv_length: int = 0
    bucket: LengthBucket[Any] | None = None
    row: int = -1

    @property
    def decoding(self) -> bool:
        return self.bucket is not None and self.row < self.bucket.num_decoding


R = TypeVar("R", bound=RowOwner)


class LengthBucket(Generic[R]):
    """Rows of `length` tokens, `capacity` of them, from token `offset` of the pools on.

    Attributes:
        keys, values: the bucket's part of the pools, [layers, rows, KV heads, length, head size].
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, length: int, shape: KVShape, dtype: torch.dtype) -> None:
        self.length = length
        self.shape = shape
        self.row_bytes = length * shape.bytes(dtype)
        self.offset = 0
        self.capacity = 0
        self.owners: list[R] = []
        self.num_decoding = 0

    @property
    def decoding(self) -> list[R]:
        return self.owners[: self.num_decoding]

    @property
    def used(self) -> int:
        return len(self.owners)

    def map_pools(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make `keys` and `values` views of the bucket's part of the pools."""
        begin, end = (tokens * self.shape.heads for tokens in (self.offset, self.offset + self.capacity * self.length))
        self.keys, self.values = (
            pool[:, begin:end].unflatten(1, (self.capacity, self.shape.heads, self.length)) for pool in (keys, values)
        )

    def pool_index(self, row: int) -> int:
        """Return the first place of `row` in the pools; KV head h begins h · `length` places behind it."""
        return (self.offset + row * self.length) * self.shape.heads

    def layer_views(self, rows: int, length: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keys and values of each layer, [rows, KV heads, length, head size], of the first rows and positions."""
        return self.keys[:, :rows, :, :length].unbind(0), self.values[:, :rows, :, :length].unbind(0)

    def add(self, owner: R) -> None:
        """Give `owner` the first free row, held."""
        row = self.used
        # Masked positions count as 0 times their content, which must therefore not be NaN.
        self.keys[:, row, :, owner.kv_length :].zero_()
        self.values[:, row, :, owner.kv_length :].zero_()
        owner.bucket, owner.row = self, row
        self.owners.append(owner)

    def start_decoding(self, owner: R) -> None:
        """Swap a held row with the first held one, and let the decoding rows end behind it."""
        self._swap(owner.row, self.num_decoding)
        self.num_decoding += 1

    def stop_decoding(self, stopped: Collection[R]) -> None:
        """Hold the decoding rows of `stopped`. Nothing is copied if no other row decodes."""
        leaving = [owner for owner in self.decoding if owner in stopped]
        if len(leaving) == self.num_decoding:
            self.num_decoding = 0
        for owner in leaving:
            if owner.decoding:
                self.num_decoding -= 1
                self._swap(owner.row, self.num_decoding)

    def remove(self, owner: R) -> None:
        """Free a row: the last decoding row fills the hole, and the last held row fills the hole that this leaves."""
        hole = owner.row
        if owner.decoding:
            self.num_decoding -= 1
            self._move(self.num_decoding, hole)
            hole = self.num_decoding
        self._move(self.used - 1, hole)
        self.owners.pop()
        owner.bucket, owner.row = None, -1

    def replace(self, old: R, new: R, kv_length: int) -> None:
        """Make `new` the owner of the row of `old`, of which it keeps the first `kv_length` tokens."""
        self.owners[old.row] = new
        new.bucket, new.row, new.kv_length = self, old.row, kv_length
        old.bucket, old.row = None, -1

    def copy(self, source: R, row: int, length: int) -> None:
        """Copy the first `length` keys and values of `source`, a row of any bucket, to `row`."""
        if length == 0:
            return
        bucket = source.bucket
        assert bucket is not None
        self.keys[:, row, :, :length].copy_(bucket.keys[:, source.row, :, :length])
        self.values[:, row, :, :length].copy_(bucket.values[:, source.row, :, :length])

    def _move(self, source: int, row: int) -> None:
        """Move the owner of row `source` to `row`, whose owner has left."""
        if source == row:
            return
        owner = self.owners[row] = self.owners[source]
        self.copy(owner, row, owner.kv_length)
        owner.row = row

    def _swap(self, i: int, j: int) -> None:
        if i == j:
            return
        a, b = self.owners[i], self.owners[j]
        for tensor in (self.keys, self.values):
            kept = tensor[:, i, :, : a.kv_length].clone()
            tensor[:, i, :, : b.kv_length].copy_(tensor[:, j, :, : b.kv_length])
            tensor[:, j, :, : a.kv_length].copy_(kept)
        self.owners[i], self.owners[j] = b, a
        a.row, b.row = j, i
