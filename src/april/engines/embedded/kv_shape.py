"""The size of a token's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one token in each of `layers` layers: `heads` KV heads of `key_size` and `value_size`."""

    layers: int
    heads: int
    key_size: int
    value_size: int

    def bytes(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * dtype.itemsize
