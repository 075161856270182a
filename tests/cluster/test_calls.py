"""Calls on the nodes of a real cluster, any of which may die or hang: each ends once, with its own result."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

import ray

from april.engines.ray.driver import connected
from april.engines.ray.node_calls import NodeCalls
from tests.cluster.raylets import Raylets
from tests.limits import HANG


def a_function() -> Callable[..., Awaitable[tuple[int, str]]]:
    """Made on a node: twice a number, and where it was doubled, once there is a file of that name."""

    async def double(number: int, gate: str) -> tuple[int, str]:
        if number < 0:
            raise ValueError(f"{number} is negative")
        Path(f"{gate}.{os.getpid()}").touch()
        try:
            while not Path(gate).exists():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            Path(f"{gate}.cancelled").touch()
            raise
        return 2 * number, ray.get_runtime_context().get_node_id()

    return double


async def started(gate: Path, count: int) -> None:
    async with asyncio.timeout(HANG):
        while len(list(gate.parent.glob(f"{gate.name}.*"))) < count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_calls_of_a_lost_node_move_to_another_node(raylets: Raylets, tmp_path: Path, number: int) -> None:
    victim = raylets.add()
    raylets.add()
    gate = tmp_path / "gate"
    async with connected(raylets.address):
        calls = NodeCalls(a_function)
        under_way = [asyncio.create_task(calls(i, str(gate))) for i in range(12)]
        await started(gate, 3)  # the head's and the nodes' processes
        raylets.signal(victim, number)
        gate.touch()
        found: list[Any] = await asyncio.wait_for(asyncio.gather(*under_way), HANG)
        assert [value for value, _ in found] == [2 * i for i in range(12)]
        with pytest.raises(ValueError, match="-1 is negative"):
            await calls(-1, str(gate))
        await calls.close()
    raylets.signal(victim, signal.SIGCONT)


async def test_an_abandoned_call_is_cancelled_on_its_node(raylets: Raylets, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with connected(raylets.address):
        calls = NodeCalls(a_function)
        given_up = asyncio.create_task(calls(1, str(gate)))
        await started(gate, 1)
        given_up.cancel()
        await started(gate, 2)
        assert Path(f"{gate}.cancelled").exists()
        gate.touch()
        assert (await asyncio.wait_for(calls(2, str(gate)), HANG))[0] == 4, "other calls go on"
        await calls.close()
