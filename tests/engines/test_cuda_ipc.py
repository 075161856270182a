"""Buckets on the trainer's device that servers read: which bytes, which handles, and how many at a time."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from april.engines.allocator_settings import unsharable_memory
from april.engines.cuda_ipc import DEVICE, exports_of, plain_uuid, sglang_tensors, sizes_of, vllm_update
from april.engines.servers.same_device import SameDevice
from april.engines.weight_transfer import Bucket, Exported, OnDisk, Receiver, WithdrawnError
from april.rollout.engine import EngineError
from tests.engines.ipc_files import SharedFiles, named_tensors
from tests.engines.servers.played_turns import SGLangUnpickler

CPU = torch.device("cpu")


def weights() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    shapes = {"embed": (11, 4), "norm": (5,), "w": (8, 6), "b": (1,), "scale": ()}
    kinds = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    named = zip(shapes.items(), kinds, strict=True)
    return {name: torch.randn(shape, generator=made).to(kind) for (name, shape), kind in named}


def read(exported: Exported, gpu: str) -> dict[str, Tensor]:
    """The tensors of a bucket, as a server on this GPU reads them."""
    bucket = exported.bucket
    return named_tensors(
        exported.handles[gpu][DEVICE + 1], bucket.names, bucket.dtypes, bucket.shapes, sizes_of(bucket)
    )


class Reader:
    """A server that reads every bucket that it opens."""

    def __init__(self, shared: SharedFiles, fail: str = "") -> None:
        self.calls: list[str] = []
        self.found: dict[str, Tensor] = {}
        self._uuid, self._fail = shared.uuid, fail

    def receiver(self, name: str = "a server", gpus: tuple[str, ...] | None = None) -> Receiver:
        def note(call: str) -> Callable[[], Any]:
            async def noted() -> None:
                self.calls.append(call)
                if call == self._fail:
                    raise TimeoutError("no answer")

            return noted

        async def open_bucket(exported: Exported, gpus: tuple[str, ...]) -> None:
            await note("open")()
            for gpu in gpus:
                self.found |= read(exported, gpu)

        own = (self._uuid,) if gpus is None else gpus
        unused: Any = None
        return Receiver(
            name,
            "http://x",
            0,
            1,
            unused,
            note("begin"),
            unused,
            note("end"),
            prepare=note("prepare"),
            open=open_bucket,
            gpus=own,
        )


def same_device(exports: Any) -> SameDevice:
    def save(path: Path) -> None:
        raise AssertionError("nothing is written in an update")

    return SameDevice(exports, OnDisk(Path("nowhere"), save))


@pytest.mark.parametrize("most", [1, 100, 10**6])
async def test_a_server_reads_the_bytes_of_every_tensor(most: int, tmp_path: Path) -> None:
    shared, sent = SharedFiles(tmp_path), weights()
    server = Reader(shared)
    transfer = same_device(lambda: exports_of(lambda: iter(sent.items()), CPU, most, shared))
    await transfer.offer(1).take(server.receiver())
    assert server.found.keys() == sent.keys()
    assert all(torch.equal(tensor, server.found[name]) for name, tensor in sent.items())
    assert server.calls[:2] == ["prepare", "begin"]
    assert server.calls[-1] == "end"
    largest = max(tensor.nbytes for tensor in sent.values())
    assert max(shared.sizes) <= max(most, largest), "no second whole copy"


async def test_servers_are_updated_together_and_tensors_are_read_once(tmp_path: Path) -> None:
    one, other, iterated = SharedFiles(tmp_path, 0), SharedFiles(tmp_path, 1), []

    def source() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights().items():
            iterated.append(name)
            yield name, tensor

    servers = [Reader(one), Reader(other)]
    transfer = same_device(lambda: exports_of(source, CPU, 50, lambda packed: one(packed) | other(packed)))
    shares = transfer.offer(1).shares(2)
    await asyncio.gather(*(share.take(server.receiver()) for share, server in zip(shares, servers, strict=True)))
    assert iterated == list(weights())
    assert all(server.found.keys() == weights().keys() for server in servers)


async def test_a_failing_server_is_named_and_the_export_ends(tmp_path: Path) -> None:
    shared, closed = SharedFiles(tmp_path), []

    def exports() -> Any:
        try:
            yield from exports_of(lambda: iter(weights().items()), CPU, 1, shared)
        finally:
            closed.append(True)

    for call in ("prepare", "begin", "open", "end"):
        closed.clear()
        with pytest.raises(EngineError, match=r"server 3 did not receive weights: .*no answer"):
            await same_device(exports).offer(1).take(Reader(shared, call).receiver("server 3"))
        assert closed == [True] * (call in ("open", "end")), call


@pytest.mark.parametrize(
    ("gpus", "where"), [((), "GPUs that april did not assign"), (("elsewhere",), "elsewhere"), (None, None)]
)
async def test_a_server_on_other_gpus_is_refused(gpus: Any, where: str | None, tmp_path: Path) -> None:
    shared = SharedFiles(tmp_path)
    transfer = same_device(lambda: exports_of(lambda: iter(weights().items()), CPU, 100, shared))
    taking = transfer.offer(1).take(Reader(shared).receiver("server 3", gpus))
    if where is None:
        await taking
        return
    with pytest.raises(EngineError, match=f"server 3 is on {where}, where no training process is"):
        await taking


async def test_weights_that_are_trained_on_are_not_offered_any_more(tmp_path: Path) -> None:
    shared = SharedFiles(tmp_path)
    transfer = same_device(lambda: exports_of(lambda: iter(weights().items()), CPU, 100, shared))
    offered = transfer.offer(1)
    transfer.withdraw()
    with pytest.raises(WithdrawnError):
        await offered.take(Reader(shared).receiver())


def bucket() -> Bucket:
    return Bucket(["w", "b"], ["float32", "bfloat16"], [[2, 3], [5]])


def test_vllm_finds_handles_by_uuid_and_bytes_by_size(tmp_path: Path) -> None:
    shared = SharedFiles(tmp_path)
    exported = Exported(bucket(), shared(torch.zeros(34, dtype=torch.uint8)))
    body = vllm_update(exported)
    assert body["tensor_sizes"] == [24, 10]
    handles = pickle.loads(base64.b64decode(body["ipc_handles_pickled"]))
    assert list(handles) == [shared.uuid]
    assert handles[shared.uuid] == exported.handles[shared.uuid]


def test_sglang_gets_an_entry_for_each_rank_with_the_handle_of_its_gpu(tmp_path: Path) -> None:
    one, other = SharedFiles(tmp_path, 0), SharedFiles(tmp_path, 1)
    packed = torch.zeros(34, dtype=torch.uint8)
    entries = sglang_tensors(Exported(bucket(), one(packed) | other(packed)), (other.uuid, one.uuid))
    for entry, shared in zip(entries, (other, one), strict=True):
        decoded = SGLangUnpickler(io.BytesIO(base64.b64decode(entry))).load()
        name, arguments = decoded["flattened_tensor"]
        assert name == "_rebuild_cuda_tensor_modified"
        assert arguments[DEVICE] == shared.uuid
        assert arguments[DEVICE + 1].decode().rpartition("/")[2].startswith(shared.uuid)
        assert [fields for _, fields in decoded["metadata"]] == [
            ("w", torch.Size([2, 3]), torch.float32, 0, 24, 24),
            ("b", torch.Size([5]), torch.bfloat16, 24, 34, 10),
        ]


def test_memory_that_cannot_be_shared_is_named() -> None:
    assert unsharable_memory({}) is None
    assert unsharable_memory({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}) is None
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        reason = unsharable_memory({name: "max_split_size_mb:64,expandable_segments:True"})
        assert reason == f"{name} sets expandable_segments:True, whose memory CUDA IPC cannot share: remove it"
    assert "torch_memory_saver" in str(unsharable_memory({"LD_PRELOAD": "/x/torch_memory_saver_hook.so"}))


def test_uuids_are_as_torch_prints_them() -> None:
    assert plain_uuid("GPU-0c4f9b1d") == plain_uuid(SimpleNamespace(uuid="0c4f9b1d").uuid)
