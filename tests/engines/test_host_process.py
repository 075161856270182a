"""A process that hosts engines for this one: its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from april.engines.connection import Connection
from april.engines.engine_server import EngineServer
from april.engines.host_process import HostProcess
from april.engines.multiplexer import Multiplexer
from april.engines.remote import RemoteEngine
from april.rollout.engine import Chunk, EngineError
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from tests.scripted_engine import ScriptedEngine


class Silent(ScriptedEngine):
    """Samples nothing."""

    async def poll(self) -> list:
        return await asyncio.get_running_loop().create_future()


@dataclass
class Forking:
    """Starts a process that holds everything open that the host holds, until `end` exists."""

    end: Path

    def load(self) -> Silent:
        if os.fork() == 0:
            while not self.end.exists():
                time.sleep(0.05)
            os._exit(0)
        return Silent()


async def test_a_death_is_detected_while_a_child_process_lives(tmp_path: Path) -> None:
    process = await HostProcess.start("the host")
    engine = RemoteEngine()
    try:
        await engine._load(process.channel(), Forking(tmp_path / "end"), 120.0)
        engine.capacity = engine.capacity.together([ScriptedEngine().capacity])
        engine.submit(Group.start(0, Prompt((1, 2)), 1, SamplingParams(9), 0).samples[0])
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the host died"):
            await asyncio.wait_for(engine.poll(), 100)  # below `patience`, after which a ping finds the death
    finally:
        (tmp_path / "end").touch()
        engine._disconnect("the test has ended")
        await process.close()


async def test_the_end_of_a_connection_does_not_wait_for_data_that_nobody_reads() -> None:
    ours, held = socket.socketpair()  # a child process of a dead host may hold the other end
    with held:
        connection, closed = await Connection.open(ours), asyncio.Event()
        connection.listen(lambda message: None, lambda reason: closed.set())
        connection.send(bytes(5_000_000))
        await asyncio.sleep(0)
        assert connection._transport.get_write_buffer_size()
        connection.end()
        try:
            await asyncio.wait_for(closed.wait(), 30)
        finally:
            connection._transport.abort()


class Counting(ScriptedEngine):
    """Counts its passes; each takes a turn of the event loop."""

    passes = 0

    async def poll(self) -> list[Chunk]:
        await asyncio.sleep(0)
        self.passes += 1
        return []

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        self.passes_before_interrupt = self.passes
        return []


async def test_an_interrupt_reaches_the_engine_within_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april.engines.engine_server.RETRY_SECONDS", 0)
    ours, theirs = socket.socketpair()
    counting, serving = Counting(), set()
    here = await Connection.open(ours)
    channels = Multiplexer(here, lambda reason: None)
    there = await Connection.open(theirs)
    Multiplexer(
        there,
        lambda reason: None,
        lambda channel: serving.add(asyncio.create_task(EngineServer(counting, channel).run())),
    )
    engine = RemoteEngine()
    engine._connect(channels.open())
    engine.capacity = counting.capacity
    engine.submit(Group.start(0, Prompt((1, 2)), 1, SamplingParams(9), 0).samples[0])
    while not counting.passes:
        await asyncio.sleep(0)
    began = counting.passes
    await engine.interrupt()
    # The turns: the call is written, read and started. A pass takes two turns here, its own and that of its sleep.
    assert counting.passes_before_interrupt - began <= 2
    engine._disconnect("the test has ended")
    await asyncio.gather(*serving)
    here.close()
    there.close()
