"""`april compare`: the arms of a recipe, and their memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from april.commands.arguments import read_recipe
from april.commands.compare import _train_in_subprocess, arms_at, arms_of
from tests.commands.conftest import status

April = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ratios", "1.5", "0.5"), "--ratios 0.5: N' is at least N"),
        (("--ratios", "4"), "rollout.over_sampling_batch_size = 12"),
        (("--ratios", "nan"), "--ratios nan"),
        (("--steps", "0"), "training.steps = 0"),
    ],
)
def test_invalid_options_are_refused_before_any_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str], message: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    assert status("compare", "recipe.toml", *options) == 2
    assert message in capsys.readouterr().err
    assert not (recipe.parent / "runs").exists()


def test_every_arm_has_the_slots_of_the_recipe_or_one_for_each_sample(recipe: Path) -> None:
    read = read_recipe([str(recipe)], "april compare")
    assert list(arms_of(read)) == ["synchronous", "partial", "synchronous, unlimited slots"]
    assert arms_of(read)["synchronous, unlimited slots"][-1] == str(6 * 3)
    arms = arms_at(read, (1.5, 2))
    assert list(arms) == ["synchronous", "N'/N = 1.5", "N'/N = 2"]
    assert [flags[flags.index("--max-num-seqs") + 1] for flags in arms.values()] == ["12"] * 3
    assert [read_recipe([str(recipe), *flags], "").rollout.over_sampling_batch_size for flags in arms.values()][1:] == [
        4,
        6,
    ]


@pytest.mark.parametrize("overlap", ["True", "auto"])
def test_a_recipe_that_overlaps_is_compared_with_itself_in_turns(recipe: Path, overlap: str) -> None:
    flags = [str(recipe), "--own-process", "--overlap", overlap]
    arms = arms_of(read_recipe(flags, "april compare"))
    assert list(arms) == ["synchronous", "partial", "partial, overlapping", "synchronous, unlimited slots"]
    overlaps = [read_recipe([*flags, *own], "april compare").overlaps for own in arms.values()]
    assert overlaps == [False, False, True, False]
    at = arms_at(read_recipe(flags, "april compare"), (1.5,))
    assert [read_recipe([*flags, *own], "april compare").overlaps for own in at.values()] == [False, True]


def test_throughput_and_memory_are_listed_for_each_ratio(recipe: Path, april: April) -> None:
    flags = ("--steps", "1", "--eval-interval", "0", "--task.eval-size", "0")
    done = april("compare", "recipe.toml", "--ratios", "2", "--seeds", "0", "--output", "out", "--", *flags)
    assert done.returncode == 0, done.stderr
    table = json.loads((recipe.parent / "out" / "compare.json").read_text())["table"]
    synchronous, partial = table["synchronous"], table["N'/N = 2"]
    assert synchronous["buffer_bytes"]["max"] == 0
    assert partial["buffer_bytes"]["max"] > 0
    assert partial["kv_cache_bytes"]["max"] > 0
    assert min(synchronous["resident_bytes"]["min"], partial["resident_bytes"]["min"]) > 1e8
    assert "resident memory" in done.stdout
    assert (recipe.parent / "out" / "ratio-2-0" / "summary.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_to_the_compared_training(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the training process saves itself on a signal, which takes a while."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"""#!{sys.executable}
import os, signal, sys, time
def stop(number, _):
    time.sleep(0.5)
    open({str(tmp_path / "saved")!r}, "w").close()
    os._exit(128 + number)
signal.signal({number:d}, stop)
os.kill(os.getppid(), {number:d})
signal.pause()
"""
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stand_in))
    assert _train_in_subprocess("recipe.toml", ()) == 128 + number
    assert (tmp_path / "saved").exists()
