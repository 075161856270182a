"""See `vllm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore


@dataclass
class StatelessProcessGroup:
    rank: int
    store: Any
    sent: int = 0
    """Number of tensors so far."""

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        return cls(rank, TCPStore(host, port, world_size, is_master=rank == 0))
