"""Ranks that are killed or stopped at random moments cost nothing but time."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tests.ranks.runs import april, rank_of, recipe_in, trained

LOSSES = int(os.environ.get("APRIL_LOSSES", "6"))
"""Ranks that are lost; 50 for the long run."""
SETTINGS = ("--steps", 12, "--save-interval", 3, "--rank-timeout", 20, "--max-restarts", 1000)


def test_ranks_that_are_killed_and_stopped_leave_the_run_that_nobody_disturbed(tmp_path: Path) -> None:
    calm = april("train", recipe_in(tmp_path, "calm"), *SETTINGS)
    said, _ = calm.communicate(timeout=1200)
    assert calm.returncode == 0, said
    disturbed = april("train", recipe_in(tmp_path, "disturbed"), *SETTINGS)
    random.seed(0)
    lost = 0
    while lost < LOSSES and disturbed.poll() is None:
        time.sleep(random.uniform(0, 15))
        try:
            os.kill(rank_of(disturbed, random.randrange(2)), random.choice((signal.SIGKILL, signal.SIGSTOP)))
        except (AssertionError, ProcessLookupError):
            continue  # between two lives
        lost += 1
    said, _ = disturbed.communicate(timeout=1200)
    assert disturbed.returncode == 0, said
    assert said.count("start anew") > 0
    assert trained(tmp_path / "disturbed") == trained(tmp_path / "calm")
    print(f"{lost} ranks lost, {said.count('start anew')} restarts")
