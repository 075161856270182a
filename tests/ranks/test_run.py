"""A run on two ranks from the command line, one of which is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from april.reporting.metrics_log import last_step
from april.training.checkpoint import checkpoints
from tests.ranks.runs import april, rank_of, recipe_in, trained, until


def test_a_rank_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    """The step after the checkpoint, which was lost with the rank, comes out as it was; then the run goes on."""
    recipe, run = recipe_in(tmp_path, "run"), tmp_path / "run"
    process = april("train", recipe)
    until(lambda: last_step(run) == 3, process)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    before = trained(run)[:3]
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert "rank 1 was ended by SIGKILL; all ranks start anew" in said
    after = trained(run)
    assert [row["step"] for row in after] == [1, 2, 3, 4]
    assert after[:3] == before
    assert all(row["grad_norm"] > 0 for row in after)
    assert checkpoints(run / "checkpoints")[-1].name == "step-000004"
