"""Ranks that torchrun starts, as on several machines: `april train` once for each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from april.reporting.metrics_log import last_step
from april.training.checkpoint import checkpoints
from tests.limits import HANG
from tests.ranks.launch import ROOT
from tests.ranks.runs import rank_of, recipe_in, trained, until

ALONE = ("--standalone", "--nproc-per-node", "2")


def torchrun(recipe: Path, *flags: str, options: tuple[str, ...] = ALONE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--max-restarts", "1", "--shutdown-timeout", "300", "-m", "april", "train", str(recipe), *flags]
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT]))
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)


def test_a_run_resumes_when_torchrun_restarts_its_ranks(tmp_path: Path) -> None:
    job = torchrun(recipe_in(tmp_path, "run"))
    until(lambda: last_step(tmp_path / "run") >= 2, job)
    os.kill(rank_of(job, 1), signal.SIGKILL)
    said, _ = job.communicate(timeout=HANG)
    assert job.returncode == 0, said
    assert [row["step"] for row in trained(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_resumes_when_two_torchruns_restart_their_ranks(tmp_path: Path, lost: int) -> None:
    recipe = recipe_in(tmp_path, "run")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    options = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "job")
    jobs = [torchrun(recipe, options=options) for _ in range(2)]
    until(lambda: last_step(tmp_path / "run") >= 2, jobs[0])
    (process,) = [rank for job in jobs for rank in [rank_in(job, lost)] if rank]
    os.kill(process, signal.SIGKILL)
    said = [job.communicate(timeout=HANG)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
    assert [row["step"] for row in trained(tmp_path / "run")] == [1, 2, 3, 4]


def rank_in(job: subprocess.Popen[str], number: int) -> int | None:
    """The process id of a rank, if this torchrun started it."""
    try:
        return rank_of(job, number)
    except AssertionError:
        return None


def test_a_signal_stops_the_run_in_good_order(tmp_path: Path) -> None:
    job = torchrun(recipe_in(tmp_path, "run"), "--steps", "1000", "--save-interval", "1000")
    until(lambda: last_step(tmp_path / "run") >= 1, job)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=HANG)
    assert "Stopped. To resume: april resume" in said
    assert checkpoints(tmp_path / "run" / "checkpoints")
