"""`april train` with an environment, as a user runs it; killed at any moment, it ends like the run that never died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from april.reporting.metrics_log import read_metrics
from tests import tiny
from tests.forked import run as april
from tests.killed_run import straight_and_killed
from tests.training.test_trainer import metrics

ENVIRONMENT = '''
import random

from april import EnvStep


class Echo:
    """Says how many vowels it heard, and rewards them; ends by chance."""

    def __init__(self, ending: float) -> None:
        self.ending = ending

    async def reset(self, prompt, seed):
        self.rng = random.Random(seed)
        return f"{prompt['id'][-1]}?"

    async def step(self, turn):
        vowels = sum(letter in "aeiou" for letter in turn.text.lower())
        return EnvStep(f" {vowels}:", vowels / 8, self.rng.random() < self.ending, {"vowels": vowels})

    def close(self):
        pass
'''
RECIPE = """
[model]
path = "policy"
[task]
kind = "environment"
prompt = "say"
eval_size = 4
correct_at = 1.0
[environment]
path = "echo.py:Echo"
params = { ending = 0.2 }
max_turns = 5
workers = 0
[rollout]
rollout_batch_size = 3
over_sampling_batch_size = 6
n_samples_per_prompt = 3
max_response_length = 48
max_staleness = 2
stop_token_ids = [20, 21, 22, 23]
[engine]
max_num_seqs = 12
context_length = 128
[algorithm]
kl_coef = 0.0
[training]
steps = 5
learning_rate = 3e-3
eval_samples = 2
eval_interval = 3
save_interval = 3
threads = 1
journal_flush_seconds = 0
[reporting]
output = "OUT"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny.save(tmp_path / "policy")
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "run")))
    return path


def test_a_run_with_an_environment_trains_on_whole_episodes(recipe: Path, tmp_path: Path) -> None:
    done = april("train", recipe)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["discarded_tokens"] == 0
    lines = steps_of(tmp_path / "run")
    assert len(lines) == 5
    assert all(line["staleness_max"] <= 2 for line in lines)
    assert all(1 <= line["reward/turns"] <= 5 for line in lines)
    assert max(line["reward/vowels"] for line in lines) > 0
    assert max(line["samples_interrupted"] for line in lines) > 0
    assert all(line["turns_mean"] == pytest.approx(line["reward/turns"]) for line in lines)
    assert all(line["environment_failures"] == 0 for line in lines)
    assert all(line["environment_seconds"] > 0 for line in lines)
    assert april("report", tmp_path / "run").returncode == 0
    assert "waiting for its environment" in (tmp_path / "run" / "report.html").read_text()


def test_episodes_run_during_training(recipe: Path, tmp_path: Path) -> None:
    flags = ("--own-process", "--overlap", "True", "--steps", "4", "--eval-interval", "0", "--eval-samples", "1")
    done = april("train", recipe, *flags)
    assert done.returncode == 0, done.stderr
    lines = steps_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["staleness_max"] <= 2 for line in lines)
    assert all(line["turns_mean"] == pytest.approx(line["reward/turns"]) for line in lines)
    assert all(line["environment_failures"] == 0 for line in lines)
    assert any(line["off_policy_token_share"] > 0 for line in lines[1:]), "what was said beside training"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["discarded_tokens"] == 0


def test_two_ranks_train_on_episodes_by_turn_like_one_process(recipe: Path, tmp_path: Path) -> None:
    flags = ("--no-partial-rollout", "--turn-discount", "0.5", "--steps", "2", "--eval-interval", "0")
    for name, own in (("one", ()), ("two", ("--processes", "2"))):
        done = april("train", recipe, *flags, "--eval-samples", "1", *own, "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert [line["step"] for line in two] == [1, 2]
    for name in ("reward", "turns_mean", "step_consumed_tokens", "step_environment_tokens"):
        assert one[0][name] == two[0][name], name
    for name in ("loss", "grad_norm", "entropy"):
        assert one[0][name] == pytest.approx(two[0][name], rel=1e-3, abs=1e-5), name
    assert one[0]["grad_norm"] > 0


def steps_of(run: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(run) if "staleness_max" in line]


def test_a_repeatedly_killed_run_ends_like_an_undisturbed_one(recipe: Path, tmp_path: Path) -> None:
    """Synchronous steps, so that which groups a step has does not depend on how long anything takes. Which samples
    share a forward pass still does, and with it the rounding of log-probabilities; no token does."""
    straight, killed = straight_and_killed(recipe, tmp_path)
    for one, other in zip(metrics(killed), metrics(straight), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name in ("samples_interrupted", "samples_resumed"):  # a killed run collects a step in several pieces
                continue
            same = pytest.approx(other[name], rel=1e-5, abs=1e-5) if isinstance(value, float) else other[name]
            assert value == same, name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("echo.py:Echo", "echo.py:Ecco"), "environment.path"),
        (("ending = 0.2", "endings = 0.2"), "endings"),
        (("max_turns = 5", 'reward = "task"'), "environment.reward"),
        (('path = "echo.py:Echo"', ""), "name the environment"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(recipe: Path, change: tuple[str, str], said: str) -> None:
    recipe.write_text(recipe.read_text().replace(*change))
    done = april("train", recipe)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
