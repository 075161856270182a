"""A share of the crash points; `python -m tests.crash_points` tries every one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        (["--stride", "60"], 2),
        (["--kind", "episodes", "--stride", "90", "--modes", "kill", "power"], 4),
        (["--kind", "mixture", "--stride", "120", "--modes", "kill", "power"], 3),
        (["--kind", "images", "--stride", "200", "--modes", "kill", "power"], 2),
    ],
    ids=["responses", "episodes", "mixture", "images"],
)
def test_a_run_killed_at_any_durable_write_ends_like_an_undisturbed_one(
    flags: list[str], least: int, tmp_path: Path
) -> None:
    """In a process of its own, which forks: this one may have threads."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.crash_points", *flags, "--json", str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    modes = json.loads(result.read_text())["modes"]
    assert all(mode["passed"] == mode["tried"] >= least for mode in modes.values())
