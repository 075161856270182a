"""Engines on the devices of ranks, on real nodes: their places, their gate, and runs whose parts are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

import aiohttp

from april import EngineError
from april.engines.ray.cluster import Cluster, EngineSpec
from april.engines.ray.driver import connected
from april.engines.ray.nodes import nodes_now
from april.engines.ray.placement import Demand, DevicePlace
from april.engines.ray.server_actor import RunningServer, ServerSettings
from april.engines.ray.server_replica import ServerReplica
from april.engines.replica import replica_of
from april.engines.start_gate import StartGate
from april.rollout.engine import Capacity
from tests import tiny
from tests.cluster.raylets import Raylets
from tests.cluster.test_run import april, ended, steps, until
from tests.cluster.test_servers import STARTING, python_of, servers
from tests.processes import processes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def working() -> Iterator[Raylets]:
    """A cluster whose head, the node of rank 0, has CPUs."""
    cluster = Raylets(network=3, cpus=2)
    yield cluster
    cluster.close()


class Connected:
    """What a replica needs of a connection to a server."""

    def __init__(self, server: RunningServer) -> None:
        self.url = server.url
        self.running, self.capacity = 0, Capacity(1, 1)
        self.refreshed = 0

    async def check(self) -> None:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as answer:
            assert answer.status == 200

    async def refresh(self) -> None:
        try:
            await self.check()
        except aiohttp.ClientError as error:
            raise EngineError(str(error)) from None
        self.refreshed += 1

    async def close(self) -> None:
        """Nothing is open."""


async def connect(server: RunningServer) -> Any:
    return Connected(server)


def fakes() -> list[int]:
    return [pid for pid, (_, command) in processes().items() if "fake_server.py -m vllm" in command]


async def test_engines_are_on_the_gpus_of_ranks_and_start_only_while_their_gate_is_open(
    working: Raylets, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/cluster/fake_server.py "$@"\n')
    interpreter.chmod(0o755)
    node = working.add(cpus=3, gpus=2).node_id
    gate = StartGate()
    engine = ServerSettings(
        kind="vllm",
        model="none",
        python=str(interpreter),
        arguments=[],
        log_dir=tmp_path,
        api_key="a key",
        max_num_seqs=1,
        context_length=1,
        on_update="recompute",
        shares_devices=True,
    )
    places = [DevicePlace(node, ("0",)), DevicePlace(node, ("1",))]
    spec = EngineSpec(
        engine=engine, demand=Demand(1, 0), replicas=2, placement="spread", connect=connect, places=places, gate=gate
    )
    async with connected(working.address):
        # Ray has assigned both GPUs to others, as it has to ranks: engines reserve CPUs alone.
        assert [found.gpus for found in nodes_now() if found.id == node] == [2.0]
        pool = await Cluster(spec).start(lambda what: None)
        variables = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in fakes()]
        assert sorted(v for own in variables for v in own if v.startswith("CUDA_VISIBLE")) == [
            "CUDA_VISIBLE_DEVICES=0",
            "CUDA_VISIBLE_DEVICES=1",
        ]
        replica = pool.members[0].replica
        assert isinstance(replica, ServerReplica)
        await gate.close()
        await replica.refresh()
        assert replica.engine.refreshed == 1, "a server that runs is connected to"  # type: ignore[attr-defined]
        await replica.kill()
        until(lambda: len(fakes()) == 1)
        with pytest.raises(EngineError):
            await replica.refresh()
        await asyncio.sleep(0)
        assert len(fakes()) == 1, "none starts while the gate is closed"
        gate.open()
        await replica.refresh()
        await replica.check()
        assert len(fakes()) == 2
        unplaced = Cluster(replace(spec, places=None))._replica(replica.capacity)
        assert replica_of(unplaced, 0) is unplaced, "a replica, also before its server has been started"
        await pool.close()
        wanted = EngineSpec(
            engine=engine, demand=Demand(2, 0), replicas=2, placement="spread", connect=connect, places=places
        )
        with pytest.raises(EngineError, match=r"\d CPUs free, and 2 engines beside its ranks take 2 CPUs each"):
            await Cluster(wanted).start(lambda what: None)


RECIPE = """
[model]
path = "{base}/policy"
[task]
kind = "records"
path = "{base}/data.jsonl"
eval_size = 2
reward = "tests.cluster.striking:even_characters"
[rollout]
rollout_batch_size = 4
over_sampling_batch_size = 6
n_samples_per_prompt = 3
max_response_length = 40
max_staleness = 2
reward_workers = 0
stop_token_ids = [20, 21, 22]
[engine]
engine = "vllm"
max_num_seqs = 8
context_length = 256
server_python = "{python}"
server_args = {arguments}
[algorithm]
kl_coef = 0.0
[training]
steps = 2000
threads = 1
learning_rate = 1e-3
eval_interval = 0
save_interval = 1
[trainer]
processes = 2
layout = "shared"
[cluster]
address = "{address}"
ranks = "nodes"
[reporting]
output = "{base}/run"
trackers = []
"""


def variables(pids: Iterable[int]) -> list[list[str]]:
    """Return the environment variables of those of these processes that still run."""
    found = []
    for pid in pids:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return found


def written(base: Path, address: str, python: Path, arguments: list[str]) -> Path:
    """Return a recipe in `base`, with its policy and its prompts."""
    tiny.save(base / "policy", head_dim=32)
    lines = (json.dumps({"prompt": "ab" * n, "answer": "a"}) for n in range(1, 11))
    (base / "data.jsonl").write_text("\n".join(lines))
    recipe = base / "recipe.toml"
    recipe.write_text(RECIPE.format(base=base, python=python, arguments=json.dumps(arguments), address=address))
    return recipe


def test_engines_that_fit_beside_ranks_are_reported_before_a_start(working: Raylets, tmp_path: Path) -> None:
    working.add(cpus=2, gpus=1)
    recipe = written(tmp_path, working.address, Path(sys.executable), [])
    found = ended(april("cluster", "check", recipe))
    assert "1 of 1 ranks fit, each with 1 GPU and 2 CPUs" in found
    assert "2 of 2 engines fit, each with 1 CPU" in found


@pytest.mark.slow
def test_servers_beside_ranks_survive_kills_of_a_server_asleep_a_rank_and_the_run(
    working: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers lose their weights whenever they sleep. Rank 1 has a GPU that Ray believes in."""
    if not python_of("vllm").exists():
        pytest.skip("vllm is not installed here: scripts/setup_vllm.sh")
    from tests.servers.conftest import VLLM

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [ROOT / "src", ROOT])))
    monkeypatch.setenv("STRUCK", str(tmp_path / "struck"))
    node = working.add(cpus=2, gpus=1)
    recipe = written(tmp_path, working.address, python_of("vllm"), VLLM)

    run = april("train", recipe)
    until(lambda: len(steps(tmp_path)) >= 2, run, STARTING)
    assert (tmp_path / "struck").read_text() == "while it slept"
    # The server on the GPU of rank 1 may be the one that was killed, and start again.
    until(lambda: any("CUDA_VISIBLE_DEVICES=0" in own for own in variables(servers(working, "vllm"))), run, STARTING)

    (rank,) = working.ranks(node)
    os.kill(rank, signal.SIGKILL)
    done = len(steps(tmp_path))
    until(lambda: len(steps(tmp_path)) >= done + 1, run, STARTING)

    os.kill(run.pid, signal.SIGKILL)
    said, _ = run.communicate()
    assert "all ranks restart from the state on disk" in said
    until(lambda: not servers(working, "vllm"))
    done = len(steps(tmp_path))
    ended(april("resume", tmp_path / "run", "--steps", done + 1), STARTING)
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, done + 2))
    assert max(row["staleness_max"] for row in rows) <= 2
    assert max(row["by_age/age_0/w_max"] for row in rows) < 1.001, "every token is of the trainer's weights"
    assert max(row["canary_gap"] for row in rows) < 1e-3
    assert sum(row["engines_lost"] for row in rows) >= 1
    until(lambda: not servers(working, "vllm"))
