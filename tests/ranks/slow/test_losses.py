"""Ranks that are killed or stopped at random moments cost nothing but time."""

from __future__ import annotations

from tests.ranks.losses import lose


def test_ranks_that_are_killed_and_stopped_leave_the_run_that_nobody_disturbed() -> None:
    """A few; `python -m tests.ranks.losses` for 50."""
    found = lose(6, 900)
    assert found["restarts"] > 0
    assert found["equal"] == found["runs"] > 0, found
