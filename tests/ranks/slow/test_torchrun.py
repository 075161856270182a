"""Ranks that torchrun starts, as on several machines: `april train` once for each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from april.reporting.metrics_log import last_step
from tests.ranks.launch import ROOT
from tests.ranks.runs import rank_of, recipe_in, trained, until


def torchrun(recipe: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "april", "train", str(recipe), *flags]
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT]))
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)


def test_a_run_goes_on_when_torchrun_starts_its_ranks_anew(tmp_path: Path) -> None:
    job = torchrun(recipe_in(tmp_path, "run"))
    until(lambda: last_step(tmp_path / "run") >= 2, job)
    os.kill(rank_of(job, 1), signal.SIGKILL)
    said, _ = job.communicate(timeout=600)
    assert job.returncode == 0, said
    assert [row["step"] for row in trained(tmp_path / "run")] == [1, 2, 3, 4]


def test_as_many_processes_as_the_recipe_says(tmp_path: Path) -> None:
    job = torchrun(recipe_in(tmp_path, "run"), "--processes", "3")
    said, _ = job.communicate(timeout=600)
    assert job.returncode != 0
    assert "trainer.processes = 3, but torchrun started 2 processes" in said
