"""When servers may start on devices that they share with the trainer."""

from __future__ import annotations

import asyncio

import pytest

from april.engines.start_gate import StartGate


async def test_a_gate_closes_when_no_server_is_starting_and_lets_none_start_until_it_opens() -> None:
    gate, ready, started = StartGate(), asyncio.Event(), []

    async def start(name: str) -> None:
        async with gate.start():
            started.append(name)
            await ready.wait()

    first = asyncio.create_task(start("first"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(gate.close())
    await asyncio.sleep(0.01)
    assert gate.starting == 1
    assert not closing.done()
    second = asyncio.create_task(start("second"))
    await asyncio.sleep(0.01)
    assert started == ["first"]
    ready.set()
    await closing
    await first
    await asyncio.sleep(0.01)
    assert started == ["first"]
    gate.open()
    await second
    assert started == ["first", "second"]


async def test_a_start_that_fails_lets_the_gate_close() -> None:
    gate = StartGate()
    with pytest.raises(OSError, match="no"):
        async with gate.start():
            raise OSError("no")
    await gate.close()
