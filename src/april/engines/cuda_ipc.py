"""CUDA IPC: tensors of the trainer that servers read on the same GPU, in the formats of vLLM 0.32 and SGLang 0.5.23.

Invariants:
- handles are keyed by the UUID of the GPU, because processes with other visible devices number them differently;
- pickles refer to the servers' functions by name, so that the trainer's environment needs neither vLLM nor SGLang;
- a handle has one reader: torch counts references of one reader per handle, and frees the memory when it is done.

It has not run on a GPU: tests encode against the servers' own classes on a CPU.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from april.engines.weight_buckets import bucket_of, buckets_of, packed
from april.engines.weight_transfer import BUCKET_BYTES, Arguments, Bucket, Exported, TensorSource

DEVICE = 6
"""Position of the device's number in `Arguments`; servers replace it by their own."""
Sharing = Callable[[Tensor], dict[str, Arguments]]
"""Shares a packed tensor with other processes; see `share`."""


def sizes_of(bucket: Bucket) -> list[int]:
    """Return the bytes of each tensor."""
    kinds = (getattr(torch, dtype) for dtype in bucket.dtypes)
    return [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, bucket.shapes, strict=True)]


def share(packed: Tensor) -> dict[str, Arguments]:
    """Return the handle of a packed tensor, by the UUID of its GPU. The caller keeps the tensor until it was read.

    Raises:
        RuntimeError: the tensor's memory cannot be shared (see `allocator_settings.py`).
    """
    torch.cuda.current_stream(packed.device).synchronize()
    _, arguments = reduce_tensor(packed)
    return {str(torch.cuda.get_device_properties(packed.device).uuid): arguments}


def plain_uuid(uuid: str) -> str:
    """Return a GPU's UUID as torch prints it: NVML puts `GPU-` before it."""
    return uuid.removeprefix("GPU-")


def exports_of(
    source: TensorSource, device: torch.device, most: int = BUCKET_BYTES, share: Sharing = share
) -> Generator[Exported, None, None]:
    """Yield a policy's tensors in buckets, packed on `device`; tensors in host memory are copied there.

    Args:
        most: bytes of a bucket.
        share: shares a packed tensor with other processes.
    """
    for tensors in buckets_of(source(), most):
        held = packed_on(device, (tensor for _, tensor in tensors))
        yield Exported(bucket_of(tensors), share(held))
        # Freed memory stays reserved for its readers, and is collected once they have released it.
        del held
        collect(device)


def packed_on(device: torch.device, tensors: Iterator[Tensor]) -> Tensor:
    """Return the bytes of tensors in one new tensor on `device`."""
    own = [tensor.to(device) for tensor in tensors]
    # Also of a single tensor a copy: the tensor itself may be trained on while a server still reads.
    return packed(own) if len(own) > 1 else packed(own).clone()


def collect(device: torch.device) -> None:
    """Free shared memory whose readers have released it."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()


def vllm_update(exported: Exported) -> dict[str, Any]:
    """Return the body of vLLM's `/update_weights` for its `ipc` backend, packed.

    vLLM unpickles the handles only with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
    """
    bucket = exported.bucket
    return {
        "names": bucket.names,
        "dtype_names": bucket.dtypes,
        "shapes": bucket.shapes,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(dict(exported.handles))).decode(),
        "tensor_sizes": sizes_of(bucket),
    }


def sglang_tensors(exported: Exported, gpus: tuple[str, ...]) -> list[str]:
    """Return `serialized_named_tensors` of SGLang's `/update_weights_from_tensor` with `flattened_bucket`.

    Args:
        gpus: UUID of each tensor-parallel rank's GPU; every rank unpickles its own entry.
    """
    bucket, end, metadata = exported.bucket, 0, []
    for name, dtype, shape, size in zip(bucket.names, bucket.dtypes, bucket.shapes, sizes_of(bucket), strict=True):
        begin, end = end, end + size
        fields = (name, torch.Size(shape), getattr(torch, dtype), begin, end, size)
        metadata.append(Reduced(SGLANG_METADATA, fields))
    entries = []
    for gpu in gpus:
        handle = exported.handles[gpu]
        # SGLang finds the device by its UUID in the place of the number.
        rebuilt = Reduced(SGLANG_REBUILD, (*handle[:DEVICE], gpu, *handle[DEVICE + 1 :]))
        entries.append({"flattened_tensor": rebuilt, "metadata": metadata})
    return [base64.b64encode(_pickled(entry)).decode() for entry in entries]


class Global(NamedTuple):
    """A function or class of the server, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """An object that the reader of a pickle makes by calling a function of its own."""

    function: Global
    arguments: Arguments


SGLANG_METADATA = Global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
SGLANG_REBUILD = Global("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")


_PYTHON: Any = pickle._Pickler  # type: ignore[attr-defined]
"""The pickler in Python, whose `save` can be overridden."""


class _Pickler(_PYTHON):  # type: ignore[misc]
    """Writes `Reduced` objects as calls of functions that this environment need not have."""

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, Reduced):
            super().save(value.function.module)
            super().save(value.function.name)
            self.write(pickle.STACK_GLOBAL)
            self.save(value.arguments)
            self.write(pickle.REDUCE)
        else:
            super().save(value, save_persistent_id)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(value)
    return buffer.getvalue()
