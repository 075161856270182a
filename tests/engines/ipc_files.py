"""Device memory that is shared by way of files: what CUDA IPC does, where there is no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UUID = "0c4f9b1d-5f6a-4a0b-8f0e-{:012d}"


class SharedFiles:
    """Shares tensors as files, with arguments in the places of torch's `rebuild_cuda_tensor`.

    Args:
        folder: gets a file for each tensor.
        gpu: number of the GPU that is played.
    """

    def __init__(self, folder: Path, gpu: int = 0) -> None:
        self.uuid = UUID.format(gpu)
        self.sizes: list[int] = []
        self._folder = folder
        self._numbers = itertools.count()

    def __call__(self, packed: Tensor) -> dict[str, tuple[Any, ...]]:
        path = self._folder / f"{self.uuid}-{next(self._numbers)}"
        path.write_bytes(packed.numpy().tobytes())
        self.sizes.append(packed.nbytes)
        handle = str(path).encode()
        own_number = 5  # of the trainer's device, which no server may use
        storage = (torch.UntypedStorage, packed.dtype, own_number, handle, packed.nbytes, 0)
        return {self.uuid: (Tensor, packed.size(), packed.stride(), 0, *storage, False, b"counter", 0, b"event", False)}


def named_tensors(
    handle: bytes, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], sizes: Sequence[int]
) -> dict[str, Tensor]:
    """The tensors of a bucket, as a server reads them."""
    packed, found, at = torch.frombuffer(bytearray(Path(handle.decode()).read_bytes()), dtype=torch.uint8), {}, 0
    for name, dtype, shape, size in zip(names, dtypes, shapes, sizes, strict=True):
        found[name] = packed[at : at + size].view(getattr(torch, dtype)).view(list(shape))
        at += size
    return found
