"""Trainer's tensors in host memory while an engine uses the device.

Tensors keep their identity: their storages are emptied and filled again. So everything that refers to a tensor remains
valid: optimizers, master weights, adapters, FSDP2's views of its shards, Megatron's parameters, and an engine that
shares parameters. One mechanism serves plain tensors and the local shards of DTensors.

Invariants:
- each tensor is either on the device with its values, or its bytes are in a host buffer and its storage is empty;
- a round trip changes no bit;
- host buffers are allocated once per part, pinned for GPUs, and kept until the end of the run;
- a move issues all copies and then synchronises once; device memory is returned to the driver before a move to the host
  returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from april.engines.device_memory import is_out_of_memory, release_cached
from april.training.recovery import TrainingError

Readable = Callable[[Tensor], Tensor]
"""Maps a tensor of the trainer to its values, which may be in host memory."""
ALIGNMENT = 256
"""Alignment in bytes of each storage within a host buffer."""


class Part(StrEnum):
    """Part of the trainer's memory, as `april memory` names it."""

    PARAMETERS = "parameters"
    """Tensors that optimizers update, and frozen models."""
    ROUNDED = "rounded copy"
    """Modules' parameters in the compute type, if they have master weights."""
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


EVERY_PART = frozenset(Part)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Bytes of a storage in a host buffer."""

    storage: torch.UntypedStorage
    """Storage on the device; empty."""
    device: torch.device
    bytes: Tensor
    """Part of the host buffer, uint8 [storage bytes]."""

    def view(self, tensor: Tensor) -> Tensor:
        """Return the values of `tensor`, which lies in this storage, as a tensor in host memory."""
        typed = self.bytes.view(tensor.dtype)
        offset = typed.storage_offset() + tensor.storage_offset()
        return typed.as_strided(tensor.size(), tensor.stride(), offset)


class Offload:
    """Moves parts of the trainer's memory between its device and host memory.

    Args:
        tensors: returns the current tensors of a part; tensors of other devices are left where they are.
        device: the trainer's device.
        allocate: allocates a host buffer of a number of bytes, uint8; pinned memory for a GPU by default.

    Attributes:
        away: parts in host memory.
        moved_bytes: bytes that moves in both directions have copied so far.
    """

    def __init__(
        self,
        tensors: Callable[[Part], Iterable[Tensor]],
        device: torch.device,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.away: set[Part] = set()
        self.moved_bytes = 0
        self._released = False
        self._tensors = tensors
        self._device = device
        self._allocate = allocate or (pinned if device.type == "cuda" else unpinned)
        self._buffers: dict[Part, Tensor] = {}
        self._copies: dict[Part, dict[int, HostCopy]] = {}

    @property
    def host_bytes(self) -> int:
        """Size of all host buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def to_host(self, parts: Collection[Part] = EVERY_PART) -> None:
        """Move parts to host memory, and return their device memory to the driver.

        Raises:
            TrainingError: host memory runs out; all parts stay where they are.
        """
        leaving: dict[Part, dict[int, HostCopy]] = {}
        for part in Part:
            if part in parts and part not in self.away:
                leaving[part] = self._copy_out(part, {key for copies in leaving.values() for key in copies})
        if leaving:
            self._synchronise()
        for copies in leaving.values():
            for copy in copies.values():
                copy.storage.resize_(0)
        self._copies |= leaving
        self.away |= leaving.keys()
        # Also if nothing leaves: caches of the last step need not stay. Garbage is searched at the first move, after
        # which engines start and plan with what is free.
        release_cached(garbage=not self._released)
        self._released = True

    def to_device(self, parts: Collection[Part] = EVERY_PART) -> None:
        """Move parts back to the device.

        Raises:
            torch.OutOfMemoryError: the device has no room for them; all parts that were away stay in host memory.
        """
        returning = [part for part in Part if part in parts and part in self.away]
        copies = [copy for part in returning for copy in self._copies[part].values()]
        try:
            for copy in copies:
                copy.storage.resize_(copy.bytes.nbytes)
        except (RuntimeError, MemoryError):
            for copy in copies:
                copy.storage.resize_(0)
            raise
        for copy in copies:
            _bytes_of(copy.storage, copy.device).copy_(copy.bytes, non_blocking=True)
            self.moved_bytes += copy.bytes.nbytes
        if copies:
            self._synchronise()
        for part in returning:
            del self._copies[part]
            self.away.remove(part)

    def of(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or its values in host memory while its part is away.

        A DTensor's result has the same placement, with a local tensor in host memory.
        """
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            own = self.of(local)
            spec: Any = tensor._spec
            return tensor if own is local else DTensor(own, spec, requires_grad=False)  # type: ignore[abstract]
        if not self.away:
            return tensor
        key = tensor.untyped_storage()._cdata
        found = next((copies[key] for copies in self._copies.values() if key in copies), None)
        return tensor if found is None else found.view(tensor)

    def _copy_out(self, part: Part, taken: set[int]) -> dict[int, HostCopy]:
        """Start to copy a part, without the storages `taken`, into its host buffer; return the copies by storage."""
        storages = list(self._storages(part, taken))
        sizes = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages]
        buffer = self._buffer(part, sum(sizes))
        copies, offset = {}, 0
        for storage, size in zip(storages, sizes, strict=True):
            held = buffer[offset : offset + storage.nbytes()]
            held.copy_(_bytes_of(storage, self._device), non_blocking=True)
            copies[storage._cdata] = HostCopy(storage, storage.device, held)
            self.moved_bytes += held.nbytes
            offset += size
        return copies

    def _storages(self, part: Part, taken: set[int]) -> Iterator[torch.UntypedStorage]:
        """Yield each storage of a part that is on the device, once."""
        seen = set(taken)
        for tensor in self._tensors(part):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if local.device.type != self._device.type or not local.untyped_storage().nbytes():
                continue
            if not local.untyped_storage().resizable():
                assert local is tensor or part is not Part.PARAMETERS, "FSDP2 gathers shards from their first storage"
                local.data = local.data.clone()  # on CPUs a loaded parameter is a part of a mapped file
            storage = local.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage

    def _buffer(self, part: Part, size: int) -> Tensor:
        held = self._buffers.get(part, torch.empty(0, dtype=torch.uint8))
        if held.nbytes >= size:
            return held
        self._buffers.pop(part, None)
        try:
            self._buffers[part] = self._allocate(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"host memory runs out: {part} takes {size / 1e9:.1f} GB of it while the engine uses the device; "
                "take a machine with more memory, more trainer.processes on more machines, or lora.rank"
            ) from None
        return self._buffers[part]

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def tensors_of(
    part: Part, models: Sequence[nn.Module], masters: Sequence[Tensor], optimizers: Sequence[Optimizer]
) -> Iterable[Tensor]:
    """Return the tensors of a part.

    Adapters' parameters are in no part: they are small, and merging needs them on the device.

    Args:
        models: trained and frozen models.
        masters: master weights of the models' parameters; empty if optimizers update the parameters themselves.
    """
    named = [found for model in models for found in model.named_parameters()]
    whole = [parameter for name, parameter in named if "lora_" not in name]
    match part:
        case Part.PARAMETERS:
            return masters or whole
        case Part.ROUNDED:
            return whole if masters else ()
        case Part.GRADIENTS:
            trained = (*(parameter for _, parameter in named), *masters)
            return [tensor.grad for tensor in trained if tensor.grad is not None]
        case Part.OPTIMIZER:
            states = (state for optimizer in optimizers for state in optimizer.state.values())
            return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor: a `Readable` of a trainer that never leaves its device."""
    return tensor


def unpinned(size: int) -> Tensor:
    """Return a host buffer for copies on a CPU."""
    return torch.empty(size, dtype=torch.uint8)


def pinned(size: int) -> Tensor:
    """Return a page-locked host buffer of exactly `size` bytes.

    torch's own pinned allocator rounds sizes up to a power of two: up to twice the memory for one large buffer.

    Raises:
        MemoryError: the driver cannot lock this amount of memory.
    """
    buffer = unpinned(size)
    if size:
        runtime: Any = torch.cuda.cudart()
        address = buffer.data_ptr()
        if code := int(runtime.cudaHostRegister(address, size, 0)):
            _absorb_error()
            raise MemoryError(f"CUDA cannot lock {size} bytes of host memory (error {code})")
        weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
    return buffer


def _absorb_error() -> None:
    """Clear the error that a failed call has left: the next kernel's check would raise it in an unrelated place.

    torch has no call for it, but the check of any kernel clears it.
    """
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Return a storage as uint8 [bytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload, no-any-return]
