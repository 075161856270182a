"""The command line as a user has it: a process, or a call where a process would only take longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from april.commands.main import run
from tests import tiny

RECIPE = """
[model]
path = "policy"
[task]
kind = "reasoning_gym"
name = "gcd"
eval_size = 4
[rollout]
rollout_batch_size = 3
over_sampling_batch_size = 6
n_samples_per_prompt = 3
max_response_length = 48
max_staleness = 2
[engine]
max_running = 12
context_length = 256
[training]
steps = 6
threads = 1
[reporting]
output = "OUT"
"""


def status(*arguments: str) -> int:
    """The exit status of `april ARGUMENTS`, in this process."""
    try:
        return run(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny.save(tmp_path / "policy")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "run")))
    return path


@pytest.fixture
def april(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`april ARGUMENTS` in a folder of its own, on a terminal of 100 columns."""

    def process(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "april", *map(str, arguments)]
        environment = {**os.environ, "COLUMNS": "100"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return process
