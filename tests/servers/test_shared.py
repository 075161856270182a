"""Engine and trainer on the same devices in turn, on real servers: `make test-shared-servers`.

On a CPU, vLLM's and SGLang's calls are real state machines that free nothing, and SGLang's assertion that it is idle is
real. The servers' own checkers reset their weights, as sleeping does on GPUs.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from april.engines.freed_memory import FreedMemory
from april.engines.pool import EnginePool
from april.engines.start_gate import StartGate
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample
from april.training.canary import Canary, canary_tokens
from april.training.offload import EVERY_PART, Part
from april.training.rank_protocol import RENDEZVOUS
from april.training.shared_devices import SharedDevices
from tests import tiny
from tests.servers.conftest import (
    CPU_CORES,
    ENVIRONMENT,
    ROOT,
    SGLANG,
    VLLM,
    Kind,
    environment,
    make_samples,
    python_of,
)
from tests.servers.shared_script import lose_weights
from tests.servers.test_train import write_recipe
from tests.servers.tiny import VOCABULARY, Oracle

pytestmark = pytest.mark.slow

AGREES = 1e-3
"""Largest difference of log-probabilities between a server and a forward pass, both in float32."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
KILLS = {10: "weights awake", 30: "serving"}
"""Interleavings in which the server is killed, and in which state; a start takes as long as many interleavings."""


class Policies:
    """A trainer whose policy of version v is the checkpoint number v modulo 3."""

    def __init__(self, models: Sequence[Path], oracles: Sequence[Oracle]) -> None:
        self.version = 0
        self._models, self._oracles = models, oracles
        self.away: set[Part] = set(EVERY_PART)

    @property
    def directory(self) -> Path:
        return self._models[self.version % 3]

    @property
    def oracle(self) -> Oracle:
        return self._oracles[self.version % 3]

    def to_device(self, parts: Collection[Part] = EVERY_PART) -> None:
        self.away -= set(parts)

    def to_host(self, parts: Collection[Part] = EVERY_PART) -> None:
        self.away |= set(parts)

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores = []
        for first, *rest in sequences:
            sample = make_samples(1, SamplingParams(len(rest)), prompt=())[0]
            sample.prompt_ids = (first,)  # type: ignore[misc]
            sample.extend(rest, [0.0] * len(rest), 0)
            scores.append(self.oracle.logprobs(sample).tolist())
        return scores


async def in_this_thread(work: Any, *args: object) -> Any:
    return work(*args)


async def generate(pool: EnginePool, samples: Sequence[Sample], tokens: int) -> None:
    """Generate until this many more tokens have come, and interrupt."""
    by_id = {sample.id: sample for sample in samples}

    def absorb(chunks: Any) -> int:
        for chunk in chunks:
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        return sum(len(chunk.token_ids) for chunk in chunks)

    for sample in samples:
        if sample.finish is None:
            pool.submit(sample)
    while tokens > 0 and (chunks := await pool.poll()):
        tokens -= absorb(chunks)
    absorb(await pool.interrupt())


async def test_fifty_interleavings(kind: Kind, models: list[Path], oracles: list[Oracle], tmp_path: Path) -> None:
    draw, gate, policies = random.Random(0), StartGate(), Policies(models, oracles)
    async with kind.start(models[0], tmp_path, gate=gate) as server:
        engine = await kind.connect(server.url, process=server, shares_devices=True)
        pool = EnginePool([engine], patience=300.0)
        canary = Canary(canary_tokens(VOCABULARY), tmp_path)
        memory = FreedMemory(dict, 1, "")
        learner: Any = policies
        turns = SharedDevices(pool, learner, gate, memory, canary, in_this_thread, EVERY_PART)

        kills = dict(KILLS)

        async def kill(number: int, state: str) -> None:
            """Kill the server in its interleaving, once: the turn is repeated after it."""
            if kills.get(number) == state:
                del kills[number]
                os.killpg(server.process.pid, signal.SIGKILL)
                await server.process.wait()

        async def turn(number: int) -> None:
            """Take the devices, lose the weights, train, and give the devices back."""
            await turns.take()
            if server.down is None:
                await lose_weights(kind.name, server.url)
            policies.version += 1

            async def update() -> None:
                await kill(number, "weights awake")
                await pool.update_weights(policies.version, policies.directory)

            await turns.give_back(update)

        await turns.begin(lambda: pool.update_weights(policies.version, policies.directory))
        try:
            for number in range(50):
                await kill(number, "serving")
                samples = make_samples(draw.randint(1, 6), SamplingParams(60), seed=number, first=100 * number)
                await generate(pool, samples, draw.randint(0, 120))
                if draw.random() < 0.3:  # an evaluation
                    others = make_samples(2, SamplingParams(5), seed=number, first=100 * number + 50)
                    await generate(pool, others, 10)
                    samples += others
                for sample in samples:
                    if sample.length:
                        expected = policies.oracle.logprobs(sample)
                        assert abs(sample.logprobs - expected).max() < AGREES, f"interleaving {number}"
                await turn(number)
                assert turns.metrics()["canary_gap"] < AGREES
        finally:
            await pool.close()


def run(
    recipe: Path, how: str, plan: list[list[Any]], variables: Mapping[str, str] = NO_VARIABLES
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.servers.shared_script", recipe, how, json.dumps(plan)],
        cwd=ROOT,
        env={**os.environ, **environment(0), "PYTHONPATH": str(ROOT / "src"), **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def run_ranks(recipe: Path, how: str, plan: list[list[Any]], world: int) -> list[subprocess.CompletedProcess[str]]:
    """Run the script as so many ranks, and return the result of each."""
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), RENDEZVOUS: f"file://{recipe.parent}/{how}"}
    of_ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(functools.partial(run, recipe, how, plan), of_ranks))


def shared_recipe(kind: str, tmp_path: Path) -> Path:
    model = tiny.save(tmp_path / "policy", head_dim=32)
    own = {"server_python": str(python_of(kind)), "server_args": VLLM if kind == "vllm" else SGLANG}
    recipe = write_recipe(tmp_path, model, engine=kind, **own)
    text = recipe.read_text().replace("save_interval = 4", "save_interval = 1")
    recipe.write_text(f'{text}\n[trainer]\nlayout = "shared"\n')
    return recipe


def check(run: Path) -> None:
    """All steps were trained once, and all tokens have the trainer's log-probabilities."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train_seconds" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["by_age/age_0/w_max"] for line in steps) < 1 + AGREES
    assert max(line["canary_gap"] for line in steps) < AGREES
    summary = json.loads((run / "summary.json").read_text())
    assert summary["discarded_tokens"] == 0
    assert summary["staleness_max"] <= 2
    traces = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]
    assert all(any(name == "engine asleep" for name, _, _ in trace["turn"]) for trace in traces)


def test_servers_that_are_killed_in_every_state(kind: Kind, tmp_path: Path) -> None:
    """The start makes the first turn, and step 1 the second one."""
    plan = [
        ["sleep", 1, "before", "server"],
        ["sleep", 3, "after", "server"],
        ["update_weights", 4, "before", "server"],
        ["wake_kv_cache", 4, "before", "server"],
    ]
    done = run(shared_recipe(kind.name, tmp_path), "new", plan)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("server killed") == len(plan), done.stdout
    assert done.stderr.count("all engines died while the trainer had the devices") == len(plan), done.stderr
    check(tmp_path / "run")


def test_a_run_that_is_killed_in_every_state_and_resumed(kind: Kind, tmp_path: Path) -> None:
    recipe = shared_recipe(kind.name, tmp_path)
    calls = [("sleep", "after"), ("wake_weights", "after"), ("update_weights", "after"), ("wake_kv_cache", "after")]
    for number, (call, moment) in enumerate(calls):
        done = run(recipe, "resume" if number else "new", [[call, 2, moment, "april"]])
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        assert "april killed" in done.stdout
    done = run(recipe, "resume", [])
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path / "run")


def test_two_ranks_and_a_server_that_is_killed_while_they_train(kind: Kind, tmp_path: Path) -> None:
    """FSDP2 over gloo: each rank has half of the state, which leaves and returns in every turn."""
    recipe = shared_recipe(kind.name, tmp_path)
    recipe.write_text(f"{recipe.read_text()}processes = 2\n")
    ranks = run_ranks(recipe, "new", [["sleep", 3, "after", "server"]], 2)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr[-3000:] for rank in ranks)
    assert "server killed after sleep 3" in ranks[0].stdout
    check(tmp_path / "run")


def test_vllm_in_the_trainers_process(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "policy", head_dim=32)
    recipe = write_recipe(tmp_path, model, engine="vllm-inproc")
    recipe.write_text(recipe.read_text() + '\n[trainer]\nlayout = "shared"\n')
    variables = {"VLLM_CPU_OMP_THREADS_BIND": str(CPU_CORES[0]), "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [python_of("vllm"), "-m", "april", "train", recipe],
        env={**os.environ, **ENVIRONMENT, **variables, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path / "run")


def test_a_cpu_build_refuses_the_option_that_april_adds_on_gpus_alone(tmp_path: Path) -> None:
    recipe = shared_recipe("vllm", tmp_path)
    recipe.write_text(recipe.read_text().replace('"--enforce-eager"', '"--enforce-eager", "--enable-sleep-mode"'))
    done = run(recipe, "new", [])
    assert done.returncode != 0
    assert "Sleep mode is not supported on current platform" in done.stderr
