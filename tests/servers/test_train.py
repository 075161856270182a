"""`april train` on the real servers: started by april, found by URL, and vLLM in the trainer's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from april.algorithms import objective
from april.config.reading import load_recipe
from april.engines.servers import weight_group
from april.engines.servers.launch import Server
from april.engines.weight_transfer import Meeting
from april.reporting.metrics_log import read_metrics
from april.reporting.progress import Progress
from april.training.build import train
from tests import tiny
from tests.limits import HANG
from tests.mixtures import mixture
from tests.servers.conftest import CPU_CORES, ENVIRONMENT, ROOT, SGLANG, SLOTS, VLLM, Kind, environment, python_of
from tests.servers.test_routes import SHAPE, SHIM

AGREES = 1e-3
"""Largest difference of log-probabilities between a server and the trainer, both in float32."""

RECIPE = f"""
[task]
kind = "reasoning_gym"
name = "gcd"
eval_size = 4
[rollout]
rollout_batch_size = 3
over_sampling_batch_size = 5    # below 2 N: at most 2 groups go over to the next step, so every step has new tokens
n_samples_per_prompt = 3
max_response_length = 60
max_staleness = 2
stop_token_ids = [20, 21, 22]
reward_workers = 0
[engine]
max_num_seqs = {SLOTS}
context_length = 256
[algorithm]
kl_coef = 0.0
entropy_coef = 0.001    # no answer is right here: it makes every token count all the same
[training]
steps = 4
learning_rate = 3e-3
eval_samples = 2
eval_interval = 4
save_interval = 4
threads = 1
"""


def write_recipe(directory: Path, model: Path, lora_rank: int = 0, **engine: Any) -> Path:
    path = directory / "recipe.toml"
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in engine.items())
    where = f'[model]\npath = "{model}"\n[reporting]\noutput = "{directory / "run"}"\n[lora]\nrank = {lora_rank}\n'
    path.write_text(where + RECIPE.replace("[engine]", f"[engine]\n{settings}"))
    return path


@dataclass
class Mismatches:
    """Largest difference of the engine's log-probabilities from the trainer's own, batch by batch."""

    on_policy: list[float] = field(default_factory=list)
    off_policy: list[float] = field(default_factory=list)


@pytest.fixture
def mismatches(monkeypatch: pytest.MonkeyPatch) -> Mismatches:
    seen = Mismatches()
    correct = objective.correct

    def watched(
        kind: Any, logp: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, ages: Tensor, *rest: Any, **bounds: Any
    ) -> Any:
        for found, chosen in ((seen.on_policy, ages == 0), (seen.off_policy, ages > 0)):
            if (mask & chosen).any():
                found.append(float((prox - behaviour)[mask & chosen].abs().max()))
        return correct(kind, logp, prox, behaviour, mask, ages, *rest, **bounds)

    monkeypatch.setattr(objective, "correct", watched)
    return seen


def check(summary: dict[str, Any] | None, mismatches: Mismatches) -> None:
    assert summary is not None
    assert summary["steps"] == 4
    assert summary["discarded_tokens"] == 0
    assert summary["off_policy_token_share"] > 0, "the workload is meant to interrupt something"
    assert summary["staleness_max"] <= 2
    assert summary["generated_tokens"] == summary["consumed_tokens"] + summary["tokens_buffered"]
    assert len(mismatches.on_policy) >= 4
    assert max(mismatches.on_policy) < AGREES
    assert max(mismatches.off_policy) > 10 * AGREES, "updates are meant to move the policy"


def leaders(word: str) -> list[int]:
    """The leaders of process groups whose command lines contain `word`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            if word in (process / "cmdline").read_text() and os.getpgid(int(process.name)) == int(process.name):
                found.append(int(process.name))
    return found


class Killing(Progress):
    """Kills the servers whose command lines contain `word` once the run has a step behind it."""

    def __init__(self, word: str) -> None:
        super().__init__(total_steps=4, file=StringIO())
        self.word = word
        self.killed: list[int] = []
        self.phases: list[str] = []

    def phase(self, name: str) -> None:
        super().phase(name)
        self.phases.append(name)

    def step(self, metrics: Mapping[str, Any], *rest: Any) -> None:
        super().step(metrics, *rest)
        if metrics["step"] == 1:
            self.killed = leaders(self.word)
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


async def test_servers_that_april_starts_and_that_die(
    kind: Kind,
    mismatches: Mismatches,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Both are killed during the run. They are restarted, get the policy's weights, and the run continues."""
    model = tiny.save(tmp_path / "policy", head_dim=32)
    for name, value in environment(0).items():
        monkeypatch.setenv(name, value)
    recipe = write_recipe(
        tmp_path,
        model,
        engine=kind.name,
        replicas=2,
        weight_transfer="broadcast",
        server_python=str(python_of(kind.name)),
        server_args=VLLM if kind.name == "vllm" else SGLANG,
    )
    sizes = []
    join = weight_group.join

    def watched(meeting: Meeting, *rest: Any) -> Any:
        sizes.append(meeting.world_size)
        return join(meeting, *rest)

    monkeypatch.setattr(weight_group, "join", watched)
    run, killing = tmp_path / "run", Killing(str(model))
    check(await train(load_recipe(recipe), progress=killing), mismatches)
    assert len(killing.killed) == 2
    assert any(phase.startswith(f"starting {kind.name}-0, ") for phase in killing.phases)
    said = [record.getMessage() for record in caplog.records]
    for name in (f"{kind.name}-0", f"{kind.name}-1"):
        log = run / "servers" / f"{name}.log"
        assert any(line.startswith(f"{name} died (killed by SIGKILL") and f"log: {log}" in line for line in said)
    assert any("is back, with weights" in line for line in said)
    assert sizes[0] == 3, "the trainer and both servers are one group"
    assert not leaders(str(model)), "the servers have ended with the run"


async def test_a_run_replays_the_routes_of_a_server_that_april_starts_and_is_resumed(
    mismatches: Mismatches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A mixture of experts on SGLang. Samples that the first part has begun keep their routes."""
    policy = mixture(num_hidden_layers=2, tie_word_embeddings=False, vocab_size=101, **SHAPE)
    policy.save_pretrained(tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    for name, value in {**environment(0), "PYTHONPATH": str(SHIM)}.items():
        monkeypatch.setenv(name, value)
    path = write_recipe(
        tmp_path,
        tmp_path / "policy",
        engine="sglang",
        weight_transfer="broadcast",
        server_python=str(python_of("sglang")),
        server_args=SGLANG,
    )
    path.write_text(path.read_text().replace("[training]", '[training]\nrouter_replay = "recorded"'))
    for steps in (2, 4):
        recipe = load_recipe(path)
        recipe.training.steps = steps
        summary = await train(recipe, resume=steps > 2)
    assert summary is not None
    assert summary["off_policy_token_share"] > 0, "the workload is meant to interrupt something"
    assert [line["missing_routes"] for line in read_metrics(tmp_path / "run") if "missing_routes" in line] == [0] * 4
    assert mismatches.on_policy[0] < AGREES, "the first step has no older tokens, whose experts are not those of now"


@pytest.mark.parametrize(("transfer", "lora_rank"), [("broadcast", 0), ("broadcast", 4), ("disk", 4), ("adapters", 4)])
async def test_a_running_server(
    transfer: str,
    lora_rank: int,
    kind: Kind,
    server: Server,
    models: list[Path],
    mismatches: Mismatches,
    tmp_path: Path,
) -> None:
    """The server was started on different weights: it gets the run's weights first.

    Adapters are sent merged, or alone, and vLLM's workers merge them. Servers that april starts get whole weights from
    disk.
    """
    if transfer == "adapters" and kind.name != "vllm":
        pytest.skip("vLLM alone takes them")
    recipe = write_recipe(tmp_path, models[1], lora_rank, engine=kind.name, urls=[server.url], weight_transfer=transfer)
    check(await train(load_recipe(recipe)), mismatches)
    assert server.process.returncode is None, "a server that april did not start goes on"


async def test_a_running_server_generates_during_training(
    kind: Kind, server: Server, models: list[Path], mismatches: Mismatches, tmp_path: Path
) -> None:
    """Requests of the rollout stop only for each update and then resume; evaluations run at the same time."""
    recipe = write_recipe(tmp_path, models[1], engine=kind.name, urls=[server.url], weight_transfer="broadcast")
    text = recipe.read_text().replace("eval_interval = 4", "eval_interval = 2")
    recipe.write_text(f"{text}\n[trainer]\noverlap = true\n")
    summary = await train(load_recipe(recipe))
    assert summary is not None
    assert summary["steps"] == 4
    assert [one["step"] for one in summary["evaluations"]] == [0, 2, 4]
    assert summary["staleness_max"] <= 2
    assert summary["discarded_tokens"] == 0
    assert summary["generated_tokens"] >= summary["consumed_tokens"] + summary["tokens_buffered"]
    assert max(mismatches.on_policy) < AGREES
    assert max(mismatches.off_policy) > 10 * AGREES, "updates are meant to move the policy"
    assert summary["off_policy_token_share"] > 0, "groups begin beside training"
    assert server.process.returncode is None, "a server that april did not start goes on"


def test_no_server_at_the_url(kind: Kind, models: list[Path], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, models[0], engine=kind.name, urls=["http://127.0.0.1:9"])
    done = subprocess.run(
        [sys.executable, "-m", "april", "train", recipe], capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 1
    assert f"no {kind.title.split()[0]} server answers at http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_vllm_in_the_trainers_process(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "policy", head_dim=32)
    recipe = write_recipe(tmp_path, model, engine="vllm-inproc")
    variables = {"VLLM_CPU_OMP_THREADS_BIND": str(CPU_CORES[0]), "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [python_of("vllm"), "-m", "april", "train", recipe],
        env={**os.environ, **ENVIRONMENT, **variables, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ratios = [line["by_age/age_0/w_max"] for line in lines if "by_age/age_0/w_max" in line]
    assert len(ratios) == 4
    assert max(ratios) < 1 + AGREES
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["off_policy_token_share"] > 0
