"""A run of `april train` that is killed and resumed, beside the same run without a kill."""

from __future__ import annotations

import subprocess
from pathlib import Path

from april.training.resume import JOURNAL
from tests import forked
from tests.forked import run, wait_until
from tests.journals import last_event


def straight_and_killed(recipe: Path, directory: Path) -> tuple[Path, Path]:
    """Return the directories of an undisturbed run, and of one that is killed twice and resumed to its end."""
    straight, killed = directory / "straight", directory / "killed"
    flags = ["--no-partial-rollout", "--output"]
    assert run("train", recipe, *flags, straight).returncode == 0
    command: tuple[object, ...] = ("train", recipe, *flags, killed)
    whole = last_event(straight / JOURNAL)
    for share in (0.3, 0.7):
        process = forked.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda share=share: last_event(killed / JOURNAL) >= share * whole, process)
        process.kill()
        process.wait()
        command = ("resume", killed)
    done = run("resume", killed)
    assert done.returncode == 0, done.stderr
    return straight, killed
