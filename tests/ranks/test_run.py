"""A run on two ranks from the command line, one of which is killed."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.runs import recipe_in, survive_a_killed_rank


def test_a_rank_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    rows = survive_a_killed_rank(recipe_in(tmp_path, "run"), tmp_path / "run")
    assert all(row["grad_norm"] > 0 for row in rows)
