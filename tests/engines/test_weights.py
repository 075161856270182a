"""How weights are offered: kept on disk while they may be asked for, withdrawn before they change, and sent once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from april.engines.servers.broadcast import Broadcast, address_towards
from april.engines.weight_transfer import InProcess, OnDisk, Receiver, Share, WithdrawnError, directory_of
from april.rollout.engine import EngineError


async def nothing(*_: Any) -> None: ...


def receiver(name: str) -> Receiver:
    return Receiver(name, f"http://127.0.0.1:1/{name}", 1, 1, nothing, nothing, nothing, nothing)


class Recorded(Broadcast):
    """Records its receivers, and fails on demand."""

    def __init__(self) -> None:
        super().__init__(lambda: iter([("w", torch.zeros(2))]))
        self.sent: list[set[str]] = []
        self.error: Exception | None = None

    async def send(self, receivers: Sequence[Receiver], offer: Any) -> None:
        offer.require()
        self.sent.append({receiver.name for receiver in receivers})
        await asyncio.sleep(0)
        if self.error:
            raise self.error


async def test_weights_are_sent_once_when_every_share_is_taken_or_released() -> None:
    broadcast = Recorded()
    shares: Sequence[Share] = broadcast.offer(1).shares(3)
    first = asyncio.create_task(shares[0].take(receiver("a")))
    second = asyncio.create_task(shares[1].take(receiver("b")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not broadcast.sent
    shares[2].release()
    shares[2].release()
    await asyncio.gather(first, second)
    assert broadcast.sent == [{"a", "b"}]
    shares[0].release()
    await broadcast.offer(2).take(receiver("c"))
    assert broadcast.sent[1:] == [{"c"}]


async def test_a_sending_that_fails_fails_for_everybody() -> None:
    broadcast = Recorded()
    broadcast.error = EngineError("b did not receive weights: it hung up")
    shares = broadcast.offer(1).shares(2)
    results = await asyncio.gather(
        *(share.take(receiver(name)) for share, name in zip(shares, "ab", strict=True)), return_exceptions=True
    )
    assert [str(result) for result in results] == [str(broadcast.error)] * 2


async def test_withdrawn_weights_are_not_sent() -> None:
    broadcast, tensors = Recorded(), InProcess(lambda: iter([("w", torch.zeros(2))]))
    sending, handed = broadcast.offer(1), tensors.offer(1)
    assert [name for name, _ in handed] == ["w"]
    for transfer in (broadcast, tensors):
        transfer.withdraw()
    with pytest.raises(WithdrawnError, match="being trained on"):
        await sending.take(receiver("a"))
    with pytest.raises(WithdrawnError):
        iter(handed)
    assert [name for name, _ in tensors.offer(2)] == ["w"]


def test_the_version_before_stays_on_disk(tmp_path: Path) -> None:
    def save(path: Path) -> None:
        path.mkdir(parents=True)
        (path / "model.safetensors").touch(0o600)

    transfer = OnDisk(tmp_path / "weights", save)
    for version in range(4):
        assert directory_of(transfer.offer(version)) == str(tmp_path / "weights" / f"v{version}")
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v2", "v3"]
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "weights" / "v3" / "model.safetensors").stat().st_mode == usual, "servers of other users read it"
    with pytest.raises(ValueError, match="must be a directory with safetensors in it"):
        directory_of(tmp_path)


def test_remote_servers_get_a_reachable_address() -> None:
    assert address_towards(["http://127.0.0.1:80", "http://localhost:81"]) == "127.0.0.1"
    towards = address_towards(["http://127.0.0.1:80", "http://192.0.2.77:8000"])
    assert towards == "192.0.2.77" or not towards.startswith("127.")
