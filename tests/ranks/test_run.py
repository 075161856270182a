"""Runs on two ranks from the command line: one of them is killed, or is not like the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from april.reporting.metrics_log import last_step, read_metrics
from tests import tiny
from tests.limits import HANG
from tests.processes import below
from tests.ranks.runs import april, recipe_in, survive_a_killed_rank, trained, until

OTHER_VERSION = """
import importlib.metadata, os

version = importlib.metadata.version
if os.environ.get("RANK") == "1":
    importlib.metadata.version = lambda name: "99" if name == "safetensors" else version(name)
"""


def test_a_killed_rank_loses_no_sample(tmp_path: Path) -> None:
    rows = survive_a_killed_rank(recipe_in(tmp_path, "run"), tmp_path / "run")
    assert all(row["grad_norm"] > 0 for row in rows)
    used = [row["engines_used"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert used[:2] == [2, 2]  # a step that the journal held after the restart was given to none


def test_a_killed_run_resumes_with_the_routes_of_its_samples(tmp_path: Path) -> None:
    """All processes are killed one step after a checkpoint, so that step is trained twice, with equal routes."""
    recipe, run = recipe_in(tmp_path, "run"), tmp_path / "run"
    tiny.mixture(sharpness=1.0).save_pretrained(tmp_path / "policy")
    process = april("train", recipe, "--router-replay", "recorded", "--expert-parallel", "2")
    until(lambda: last_step(run) == 3, process)
    for pid in below(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    before = trained(run)[:3]
    resumed = april("resume", run)
    said, _ = resumed.communicate(timeout=HANG)
    assert resumed.returncode == 0, said
    after, rows = trained(run), [row for row in read_metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert after[:3] == before
    assert [row["missing_routes"] for row in rows] == [0.0] * 4
    assert sum(row["off_policy_token_share"] for row in rows) > 0, "the workload is meant to interrupt something"


def test_ranks_with_different_versions_are_refused_in_one_line(tmp_path: Path) -> None:
    """Before the policy is loaded: it has no weights."""
    recipe, modules = recipe_in(tmp_path, "run"), tmp_path / "modules"
    modules.mkdir()
    (tmp_path / "policy" / "model.safetensors").unlink()
    (modules / "sitecustomize.py").write_text(OTHER_VERSION)
    process = april("train", recipe, modules=modules)
    said, _ = process.communicate(timeout=HANG)
    assert process.returncode == 2, said
    (line,) = said.splitlines()
    assert line.startswith("april: rank 1 has safetensors 99, not ")
    assert line.endswith("ranks must be alike; start all from the same environment")
