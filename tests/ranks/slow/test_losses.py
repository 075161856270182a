"""Ranks that are killed or stopped at random moments cost nothing but time."""

from __future__ import annotations

from tests.ranks.losses import lose


def test_a_run_with_killed_and_stopped_ranks_equals_an_undisturbed_run() -> None:
    """A few; `python -m tests.ranks.losses` for 50."""
    found = lose(6, 900)
    assert found["restarts"] > 0
    assert found["equal"] == found["runs"] > 0, found
