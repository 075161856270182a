"""A process that hosts engines for this one: its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from april.engines.host_process import HostProcess
from april.engines.remote import RemoteEngine
from april.rollout.engine import EngineError
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


async def test_a_death_is_noticed_also_if_a_process_that_it_has_forked_lives_on(tmp_path: Path) -> None:
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
