"""Runs from the command line on real ranks, and how their processes are found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.reporting.metrics_log import last_step, read_metrics
from april.training.checkpoint import checkpoints
from tests import tiny
from tests.limits import HANG
from tests.processes import below, reachable
from tests.ranks.launch import ROOT

RECIPE = """
[model]
path = "{model}"
device = "cpu"
[task]
kind = "records"
path = "{data}"
eval_size = 2
reward = "tests.ranks.rewards:even_characters"
[rollout]
rollout_batch_size = 4
over_sampling_batch_size = 6
n_samples_per_prompt = 4
max_response_length = 24
reward_workers = 0
[engine]
context_length = 256
[algorithm]
kl_coef = 0.0
[training]
steps = 4
learning_rate = 1e-3
eval_interval = 0
eval_samples = 1
save_interval = 2
journal_flush_seconds = 0
max_tokens_per_micro_batch = 512
[trainer]
processes = 2
rank_timeout = 600
[reporting]
output = "{output}"
trackers = []
"""


def recipe_in(base: Path, name: str) -> Path:
    """A recipe in `base`, whose run is in the folder `name` there."""
    path = base / f"{name}.toml"
    path.write_text(RECIPE.format(**materials(base), output=base / name))
    return path


def materials(base: Path) -> dict[str, Path]:
    """A small policy and its prompts in `base`, made if they are not there."""
    made = {"model": base / "policy", "data": base / "data.jsonl"}
    if not made["model"].exists():
        tiny.save(made["model"], sharpness=1.0)
        prompts = (json.dumps({"prompt": "ab" * n, "answer": "a"}) for n in range(1, 11))
        made["data"].write_text("\n".join(prompts))
    return made


def april(*arguments: object, modules: Path | None = None) -> subprocess.Popen[str]:
    """`april` with these arguments; Python looks for modules in the folder `modules` first."""
    path = os.pathsep.join(map(str, [*([modules] if modules else []), ROOT / "src", ROOT]))
    return subprocess.Popen(
        [sys.executable, "-m", "april", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rank_of(agent: subprocess.Popen[str], number: int) -> int:
    """The process id of a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            of_agent = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == agent.pid
            if of_agent and f"RANK={number}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except (OSError, ValueError):
            continue
    raise AssertionError(f"rank {number} does not run")


def until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def trained(run: Path) -> list[dict[str, Any]]:
    """What does not depend on the clock, of each step."""
    names = ("step", "policy_version", "loss", "grad_norm", "reward", "entropy", "staleness_mean", "ratio_mean")
    more = ("step_consumed_tokens", "groups_consumed", "response_length_mean")
    return [{name: row[name] for name in (*names, *more)} for row in read_metrics(run) if "loss" in row]


def survive_a_killed_rank(recipe: Path, run: Path, modules: Path | None = None) -> list[dict[str, Any]]:
    """The metrics of a run of four steps whose second rank is killed after the third: the repeated step has the same
    result, and the run continues to its end."""
    process = april("train", recipe, modules=modules)
    until(lambda: last_step(run) == 3, process)
    listening = reachable(below(process.pid))
    assert set(listening.values()) == {False}, listening
    os.kill(rank_of(process, 1), signal.SIGKILL)
    before = trained(run)[:3]
    said, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0, said
    assert "rank 1 was ended by SIGKILL; all ranks restart" in said
    after = trained(run)
    assert [row["step"] for row in after] == [1, 2, 3, 4]
    assert after[:3] == before
    assert checkpoints(run / "checkpoints")[-1].name == "step-000004"
    return after
