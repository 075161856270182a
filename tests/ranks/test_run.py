"""Runs on two ranks from the command line: one of them is killed, or is not like the other."""

from __future__ import annotations

from pathlib import Path

from april.reporting.metrics_log import read_metrics
from tests.limits import HANG
from tests.ranks.runs import april, recipe_in, survive_a_killed_rank

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
