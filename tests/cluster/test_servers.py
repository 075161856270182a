"""A real server on a node of a real cluster, of vLLM or SGLang: driven over HTTP, and started again when it dies."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: scripts/setup_cluster.sh")

from tests.cluster.raylets import Raylets
from tests.cluster.test_run import april, steps, until
from tests.processes import below, processes

ROOT = Path(__file__).parents[2]
RECIPE = """
[model]
path = "{model}"
[task]
kind = "reasoning_gym"
name = "gcd"
eval_size = 4
[rollout]
rollout_batch_size = 3
over_sampling_batch_size = 6
n_samples_per_prompt = 3
max_response_length = 60
max_staleness = 2
stop_token_ids = [20, 21, 22]
[engine]
engine = "{kind}"
max_num_seqs = 8
context_length = 256
server_python = "{python}"
server_args = {arguments}
[cluster]
address = "{address}"
replicas = 1
[training]
steps = 2000
threads = 1
save_interval = 2
[reporting]
output = "{output}"
"""
STARTING = 600.0
"""Seconds that only a server that hangs takes to start."""
COMMANDS = {"vllm": "-m vllm.entrypoints.openai.api_server", "sglang": "-m sglang.launch_server"}


def python_of(kind: str) -> Path:
    return Path(os.environ.get(f"APRIL_{kind.upper()}_PYTHON", ROOT / ".servers" / kind / "bin" / "python"))


def servers(raylets: Raylets, kind: str) -> list[int]:
    """The servers themselves, without the processes that they spawn."""
    alive = processes()
    found = [pid for engine in raylets.engines() for pid in below(engine)]
    return [pid for pid in found if COMMANDS[kind] in alive.get(pid, (0, ""))[1]]


def left_of(groups: set[int]) -> list[int]:
    """The processes of these process groups: those that a server starts are in its own."""
    found = []
    for pid in processes():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) in groups:
                found.append(pid)
    return found


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_server_is_started_on_a_node_and_restarted_when_it_dies(
    raylets: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if not python_of(kind).exists():
        pytest.skip(f"{kind} is not installed here: scripts/setup_{kind}.sh")
    from tests.servers.conftest import SGLANG, VLLM
    from tests.servers.tiny import tiny_model

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    raylets.add()
    arguments = {"vllm": VLLM, "sglang": SGLANG}[kind]
    model = tiny_model(tmp_path / "policy", seed=0)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        RECIPE.format(
            model=model,
            kind=kind,
            python=python_of(kind),
            arguments=json.dumps(arguments),
            address=raylets.address,
            output=tmp_path / "run",
        )
    )
    run = april("train", recipe)
    until(lambda: len(steps(tmp_path)) >= 2, run, STARTING)
    (victim,) = servers(raylets, kind)
    groups = {os.getpgid(victim)}
    os.kill(victim, signal.SIGKILL)
    until(lambda: servers(raylets, kind) not in ([], [victim]), run)
    groups |= set(map(os.getpgid, servers(raylets, kind)))
    behind = len(steps(tmp_path))
    until(lambda: len(steps(tmp_path)) >= behind + 2, run, STARTING)
    os.kill(run.pid, signal.SIGINT)
    run.communicate()
    found = steps(tmp_path)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert max(row["staleness_max"] for row in found) <= 2
    assert sum(row["engines_lost"] for row in found) >= 1
    until(lambda: not left_of(groups))
