"""Runs with overlapped training: real processes, signals, kills."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.reporting.metrics_log import read_metrics
from tests import forked, tiny
from tests.forked import AprilProcess, wait_until
from tests.forked import run as april
from tests.limits import HANG
from tests.training.test_trainer import ROLLOUT, TRAINING

OVERLAP = ("--own-process", "--overlap", "True")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return tiny.recipe(tmp_path, rollout=ROLLOUT, algorithm="kl_coef = 0.0\n", training=TRAINING)


def test_an_overlapped_run_keeps_the_bound_and_loses_no_group_across_stops_and_kills(
    small: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = forked.start("train", small, *OVERLAP, "--steps", 1000, "--eval-interval", 4)
    wait_for_step(run, 5, process)
    process.kill()
    process.communicate()
    before = rollouts(run)

    process = forked.start("resume", run)
    wait_for_step(run, 8, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == 130, said
    stopped = read_metrics(run)[-1]["step"]
    again = rollouts(run)
    for step, was in before.items():
        assert again[step] == was, "the steps since the checkpoint are trained on again as they were"

    done = april("resume", run, "--steps", stopped + 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_metrics(run) if "staleness_max" in line]
    assert [line["step"] for line in lines] == list(range(1, stopped + 3))
    assert [line["policy_version"] for line in lines] == list(range(stopped + 2))
    assert max(line["staleness_max"] for line in lines) <= 2
    assert lines[-1]["discarded_tokens"] == 0
    assert any(line["off_policy_token_share"] == 1 for line in lines[1:]), "whole groups are sampled beside training"


def wait_for_step(run: Path, step: int, process: AprilProcess) -> None:
    log = run / "metrics.jsonl"
    wait_until(lambda: log.exists() and any(line["step"] >= step for line in read_metrics(run)), process)


def rollouts(run: Path) -> dict[int, tuple[float, ...]]:
    """The groups of each step, as recorded in the metrics."""
    names = ("reward", "step_consumed_tokens", "staleness_mean", "off_policy_token_share")
    return {line["step"]: tuple(line[name] for name in names) for line in read_metrics(run) if names[1] in line}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": {"overlap": True}}, r"generates in the process that trains; set engine\.own_process"),
        (
            {"trainer": {"overlap": True}, "engine": {"own_process": True}, "rollout": {"max_staleness": 0}},
            "max_staleness = 1 or more",
        ),
        ({"engine": {"own_process": True, "engine": "vllm"}}, 'it is for "embedded"'),
    ],
)
def test_overlap_that_cannot_be_is_refused(settings: dict[str, dict[str, object]], message: str) -> None:
    recipe = Recipe()
    for section, values in settings.items():
        for name, value in values.items():
            setattr(getattr(recipe, section), name, value)
    with pytest.raises(ConfigError, match=message):
        check_recipe(recipe)
