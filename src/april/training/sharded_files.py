"""Safetensors files that several ranks write together, and any number of ranks reads.

A file equals one written by a single process: each tensor is whole, under its own name, in one file. Each rank writes
the rows that it holds at their offsets. No tensor is gathered, transformers and engines can read the files, and a
reader reads only the rows that it needs.

Invariants:
- every byte of a tensor is written by exactly one rank;
- beyond its own tensors, a rank holds at most one block of rows of another type;
- a file's layout depends only on names, shapes and types, so all ranks compute the same layout.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from april.training.checkpoint import DamagedCheckpointError
from april.training.stored_names import Parts

FILE_BYTES = 4 << 30
"""Maximum size of a file, unless a single tensor is larger."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class File:
    """Layout of one file."""

    name: str
    header: bytes
    offsets: dict[str, int]
    """Offset of each tensor from the start of the file."""
    size: int


def write(
    directory: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    rank: int,
    make: Callable[[str], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    parts: Parts | None = None,
    kept: Collection[str] = (),
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write this rank's rows of `tensors`; the files are complete once every rank has returned.

    Args:
        directory: existing directory on a disk that all ranks share.
        stem: files are called `<stem>.safetensors`, or are numbered and have an index, as in transformers.
        tensors: tensors by names that are equal on all ranks: DTensors, or equal tensors that rank 0 writes.
        make: returns, by name and in order, the tensor to write, of the same shape, type and placement.
        dtype: type in which floating point numbers are written; unchanged if None.
        parts: names of the parts of a tensor in the files, in place of the tensor's name.
        kept: names of tensors that are written in their own type.
    """
    parts = parts or {}
    make = make or tensors.__getitem__
    types = {
        name: dtype if dtype and tensor.is_floating_point() and name not in kept else tensor.dtype
        for name, tensor in tensors.items()
    }
    files = _layout(stem, tensors, types, parts, file_bytes)
    for file in files:
        descriptor = os.open(directory / file.name, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if rank == 0:
                # Others may have written rows already: setting the common final size never cuts them off.
                os.ftruncate(descriptor, file.size)
                os.pwrite(descriptor, file.header, 0)
            for name, begin in file.offsets.items():
                for offset, rows in _own_rows(make(name).to(types[name]), rank):
                    _write_all(descriptor, rows, begin + offset)
        finally:
            os.close(descriptor)
    if rank == 0 and len(files) > 1:
        places = {part: file.name for file in files for name in file.offsets for part in parts.get(name, (name,))}
        total = sum(file.size - len(file.header) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def read(directory: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place with their rows from the files that `write` made.

    Raises:
        CheckpointError: a file cannot be read.
        ValueError: the files hold other tensors, or tensors of other shapes; the message names one.
    """
    found = stored(directory, stem)
    if found.keys() != tensors.keys():
        other = sorted(found.keys() ^ tensors.keys())[0]
        raise ValueError(f"{other} is {'not asked for' if other in found else 'missing'}")
    for path in sorted(set(found.values())):
        with opened(path) as file:
            for name in (name for name, place in found.items() if place == path):
                stored_rows, local = file.get_slice(name), _local(tensors[name])
                if (shape := list(stored_rows.get_shape())) != list(tensors[name].shape):
                    raise ValueError(f"{name} is {shape}, not {list(tensors[name].shape)}")
                if local.numel():
                    local.copy_(stored_rows[_place(tensors[name])] if shape else file.get_tensor(name))


def stored(directory: Path, stem: str) -> dict[str, Path]:
    """Return the file of each tensor, by name; empty if nothing was written under `stem`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    whole, index = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not whole.is_file():
        return {}
    with opened(whole) as file:
        return dict.fromkeys(file.keys(), whole)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors for reading.

    Raises:
        CheckpointError: it cannot be.
    """
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{path}: this checkpoint cannot be read: {error}") from None


def _layout(
    stem: str, tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype], parts: Parts, file_bytes: int
) -> list[File]:
    names: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * types[name].itemsize
        if names[-1] and held + size > file_bytes:
            names.append([])
            held = 0
        names[-1].append(name)
        held += size
    if len(names) == 1:
        return [_file(f"{stem}.safetensors", names[0], tensors, types, parts)]
    return [
        _file(f"{stem}-{number:05d}-of-{len(names):05d}.safetensors", part, tensors, types, parts)
        for number, part in enumerate(names, 1)
    ]


def _file(
    name: str, held: list[str], tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype], parts: Parts
) -> File:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    for tensor in held:
        begins[tensor] = at
        for part, shape in parts.get(tensor, {tensor: tuple(tensors[tensor].shape)}).items():
            end = at + math.prod(shape) * types[tensor].itemsize
            entries[part] = {"dtype": DTYPES[types[tensor]], "shape": list(shape), "data_offsets": [at, end]}
            at = end
    text = json.dumps(entries).encode()
    # As the safetensors library does: spaces align the tensors to 8 bytes.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return File(name, header, {tensor: len(header) + begin for tensor, begin in begins.items()}, len(header) + at)


def _own_rows(tensor: Tensor, rank: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of `tensor` that this rank writes, as (offset in bytes, contiguous tensor)."""
    local, place = _local(tensor), _place(tensor)
    if not local.numel() or not _writes(tensor, rank):
        return
    local = local.detach().contiguous()
    # Inner dimensions that are whole are contiguous in the file; iterate over the dimensions before them.
    inner = local.dim()
    while inner > 0 and local.shape[inner - 1] == tensor.shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    strides = np.array([int(np.prod(tensor.shape[d + 1 :], dtype=np.int64)) for d in range(tensor.dim())])
    starts = np.array([part.start for part in place], dtype=np.int64)
    for index in np.ndindex(*local.shape[:inner]):
        at = starts.copy()
        at[:inner] += np.array(index, dtype=np.int64)
        yield int((at * strides).sum()) * tensor.element_size(), local[index]


def _writes(tensor: Tensor, rank: int) -> bool:
    """Whether this rank writes its part: of equal copies, the first holder writes."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    first = bool((mesh.mesh == 0).any())  # of several meshes with a copy each, the mesh of rank 0 writes
    return first and all(
        at == 0 for place, at in zip(tensor.placements, coordinate, strict=True) if place.is_replicate()
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _write_all(descriptor: int, tensor: Tensor, offset: int) -> None:
    held = tensor.cpu().contiguous()
    # Not by `numpy()`: torch never resizes a storage again of which there was an array, and shards on shared devices
    # leave by being resized (`offload.py`).
    data = memoryview((ctypes.c_char * held.nbytes).from_address(held.data_ptr())).cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
