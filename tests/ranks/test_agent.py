"""A run on two ranks from the command line: lost ranks, memory, signals, and who says what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from april.reporting.metrics_log import last_step, read_metrics
from april.training.checkpoint import checkpoints
from tests import tiny
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
journal_delay = 0
max_tokens_per_micro_batch = 512
[trainer]
processes = 2
rank_timeout = 60
[reporting]
output = "{output}"
trackers = []
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the recipe of a run in the folder of that name."""
    base = tmp_path_factory.mktemp("ranks")
    tiny.save(base / "policy", sharpness=1.0)
    (base / "data.jsonl").write_text("\n".join(json.dumps({"prompt": "ab" * n, "answer": "a"}) for n in range(1, 11)))

    def made(name: str) -> Path:
        path = base / f"{name}.toml"
        path.write_text(RECIPE.format(model=base / "policy", data=base / "data.jsonl", output=base / name))
        return path

    return made


def april(*arguments: object) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
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


def trained(directory: Path) -> list[dict[str, object]]:
    """What does not depend on the clock of each step."""
    names = ("loss", "grad_norm", "reward_mean", "entropy", "staleness_mean", "version")
    return [{name: row[name] for name in names if name in row} for row in read_metrics(directory)]


@pytest.fixture(scope="module")
def undisturbed(recipe: Callable[[str], Path]) -> Path:
    process = april("train", recipe("undisturbed"))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return recipe("undisturbed").with_suffix("")


def test_a_run_on_two_ranks_leaves_what_a_run_leaves(undisturbed: Path) -> None:
    assert last_step(undisturbed) == 4
    assert [path.name for path in checkpoints(undisturbed / "checkpoints")] == ["step-000002", "step-000004"]
    assert all(row["grad_norm"] > 0 for row in read_metrics(undisturbed)[1:])


def test_a_rank_that_is_killed_costs_nothing(recipe: Callable[[str], Path], undisturbed: Path) -> None:
    path = recipe("killed")
    run = path.with_suffix("")
    process = april("train", path)
    until(lambda: last_step(run) == 3, process)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "rank 1 was ended by SIGKILL; all ranks start anew" in said
    assert trained(run) == trained(undisturbed)
