"""Starts jobs of several processes that train by TRL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.limits import HANG

REPOSITORY = Path(__file__).parents[3]


def launch(options: str, job: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two processes of the module `job`, by `accelerate launch` with these options, one thread each."""
    machine = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = f"-m accelerate.commands.launch {options} {machine} -m tests.integrations.trl.{job}"
    path = f"{REPOSITORY / 'src'}:{REPOSITORY}"
    return subprocess.run(
        [sys.executable, *command.split(), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
