"""Episodes whose environments live on the nodes of a real cluster, one of which is killed in mid-episode."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

from april import EnvStep, Turn
from april.engines.ray.driver import connected
from april.engines.ray.node_environments import NodeEnvironments
from april.environments.workers import EnvironmentHost, EnvironmentWorkers
from april.rollout.params import EpisodeLimits
from tests.cluster.raylets import Raylets
from tests.environments.worlds import Sturdy
from tests.limits import HANG
from tests.rollout.test_episodes import build, check, run
from tests.talking import World


class Patient(Sturdy):
    """Answers its first two turns at once, and later turns when there is a gate; `waits.PID` marks a waiting
    process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, turn: Turn) -> EnvStep:
        if turn.index >= 2:
            (self.folder / f"waits.{os.getpid()}").touch()
            while not (self.folder / "gate").exists():
                time.sleep(0.01)
        return super().step(turn)


def host(folder: Path) -> EnvironmentHost:
    return EnvironmentHost(EnvironmentWorkers(partial(Patient, folder), most=1))


async def test_a_node_killed_within_an_episode_loses_no_episode(raylets: Raylets, tmp_path: Path) -> None:
    victim = raylets.add()
    raylets.add()
    limits = EpisodeLimits(retry_delay=0.0, reset_timeout=HANG, step_timeout=HANG)
    async with connected(raylets.address):
        with closing(NodeEnvironments(partial(host, tmp_path))) as environments:
            rollouts = build(World(), limits, make=environments, rollout_batch_size=8)
            collecting = asyncio.create_task(run(rollouts, 1))
            async with asyncio.timeout(HANG):
                while not any(raylets.holds(victim, int(path.suffix[1:])) for path in tmp_path.glob("waits.*")):
                    await asyncio.sleep(0.05)
                    assert not collecting.done() or collecting.result()
            raylets.signal(victim, signal.SIGKILL)
            (tmp_path / "gate").touch()
            (step,) = await asyncio.wait_for(collecting, HANG)
    for group in step.groups:
        check(group)
    assert {failure.kind for failure in step.failures} == {"environment lost"}
    assert rollouts.buffer.restarted.groups == 0
