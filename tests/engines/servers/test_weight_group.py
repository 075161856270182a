"""Weights over a process group, with receivers in processes of their own: gloo plays nccl, which needs GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from april.engines.servers import weight_group
from april.engines.servers.broadcast import Broadcast
from april.engines.servers.client import RequestError
from april.engines.weight_transfer import Meeting, Receiver
from april.rollout.engine import EngineError

RECEIVER = """
import json, math, sys
from datetime import timedelta
import torch, torch.distributed as dist
from april.engines.servers.weight_group import join
from april.engines.weight_transfer import Meeting
group, held = None, {}
print("ready", flush=True)
for line in sys.stdin:
    order, told = json.loads(line)
    answer = None
    if order == "join":
        group = join(Meeting(**told), timedelta(seconds=30))
    elif order == "receive":
        kinds = [getattr(torch, kind) for kind in told["dtypes"]]
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, told["shapes"])]
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(packed, src=0, group=group)
        for name, kind, shape, part in zip(told["names"], kinds, told["shapes"], packed.split(sizes)):
            held[name] = part.view(kind).view(shape).double().sum().item()
    elif order == "held":
        answer = held
    print(json.dumps(answer), flush=True)
"""
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "7",
}


class Server:
    """A process that receives weights."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", RECEIVER], **pipes)
        self.orders: list[str] = []
        self.nccl: str | None = None
        self.dies_receiving = False

    def _ask(self, order: str, told: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([order, told]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RequestError("it has died")
        return json.loads(line)

    async def ask(self, order: str, told: Any = None) -> Any:
        self.orders.append(order)
        if order == "receive" and self.dies_receiving:
            self.process.kill()
        return await asyncio.to_thread(self._ask, order, told)

    def receiver(self, life: int = 1) -> Receiver:
        async def nothing() -> None: ...

        async def nccl() -> str | None:
            return self.nccl

        return Receiver(
            name="vllm-0",
            url="http://127.0.0.1:1",
            life=life,
            workers=1,
            join=lambda meeting: self.ask("join", asdict(meeting)),
            begin=nothing,
            receive=lambda _, bucket: self.ask("receive", asdict(bucket)),
            end=nothing,
            nccl_version=nccl,
        )


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started = [Server() for _ in range(2)]
    for server in started:
        assert server.process.stdout is not None
        server.process.stdout.readline()
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Of three types, so that bytes in the order of names would not be aligned."""
    torch.manual_seed(0)
    yield "scale", torch.tensor(3.0, dtype=torch.bfloat16)
    for i in range(8):
        yield f"layer.{i}", torch.randn(5, 3 + i)
        yield f"norm.{i}", torch.randn(3, dtype=torch.bfloat16)
    yield "position", torch.arange(7)
    yield "table", torch.randn(9, 11).T


async def test_each_bucket_is_one_collective_and_a_dead_server_ends_only_its_group(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server dies in the middle of an update: the update fails, its group is freed, the next server is sent to."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    first, second = servers
    subject = Broadcast(tensors, bucket_bytes=700)
    await subject.offer(1).take(first.receiver())
    expected = {name: tensor.double().sum().item() for name, tensor in tensors()}
    assert await first.ask("held") == pytest.approx(expected)
    size = sum(tensor.nbytes for _, tensor in tensors())
    buckets = first.orders.count("receive")
    assert size / 700 <= buckets <= 2 * size / 700 + 1
    assert buckets < len(expected)

    first.dies_receiving = True
    with pytest.raises(EngineError, match="vllm-0 did not receive weights"):
        await subject.offer(2).take(first.receiver())
    assert not c10d._world.pg_map, "the group is freed"
    await subject.offer(3).take(second.receiver(life=2))
    assert await second.ask("held") == pytest.approx(expected)
    assert subject.meetings == 2
    await subject.offer(4).take(second.receiver(life=2))
    assert subject.meetings == 2
    await subject._leave(next(iter(subject._groups)))


async def test_incompatible_versions_of_nccl_are_named_before_the_group_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[Any] = []

    async def join(meeting: Any) -> None:
        joined.append(meeting)

    async def nothing(*_: Any) -> None: ...

    async def version() -> str:
        return "2.28.9"

    monkeypatch.setattr(weight_group, "nccl_version", lambda: "2.29.7")
    url = "http://127.0.0.1:1"
    receiver = Receiver(f"vllm-0 at {url}", url, 1, 1, join, nothing, nothing, nothing, version)
    with pytest.raises(EngineError, match=r"vllm-0 at .* has NCCL 2\.28\.9 and the trainer 2\.29\.7, which do not"):
        await Broadcast(tensors, "nccl").offer(1).take(receiver)
    assert not joined


def test_a_failed_collective_is_an_error_of_this_process_and_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads what its watchdog does to the process when it makes a group."""
    seen = []
    make = c10d._new_process_group_helper

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(os.environ.get(weight_group.WATCHDOG))
        return make(*arguments, **named)

    monkeypatch.setattr(c10d, "_new_process_group_helper", watched)
    monkeypatch.setenv(weight_group.WATCHDOG, "1")
    limit = timedelta(seconds=10)
    store = weight_group.listen("127.0.0.1", limit)
    group = weight_group.join(Meeting("127.0.0.1", store.port, 1, 0, "alone", "gloo"), limit, store)
    weight_group.send(torch.zeros(2), group, limit)
    weight_group.leave(group)
    weight_group.leave(group)
    assert seen == ["2"]
    assert os.environ[weight_group.WATCHDOG] == "1"
    assert group not in c10d._world.pg_map
