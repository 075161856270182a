"""Tables of a recipe on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from april.commands.arguments import read_recipe
from april.rollout.trajectory.routes import RouterReplay
from april.tasks.scoring import SpecScorer
from april.tasks.task import Problem
from tests.commands.conftest import status

TABLE = """
[task.rewards]
"task" = 1.0
"april.tasks.format:answered" = 0.5
"""


@pytest.fixture
def weighed(recipe: Path) -> Path:
    recipe.write_text(recipe.read_text() + TABLE)
    return recipe


def test_a_flag_replaces_the_whole_table(weighed: Path) -> None:
    kept = read_recipe([str(weighed)], "april train")
    assert kept.task.rewards == {"task": 1.0, "april.tasks.format:answered": 0.5}
    flags = ["--task.rewards", "task", "2", "april.tasks.length:per_thousand", "-100"]
    task = read_recipe([str(weighed), *flags], "april train").task
    assert task.rewards == {"task": 2.0, "april.tasks.length:per_thousand": -100.0}
    problem = Problem("p", "?", "4", {"source_dataset": "gcd"})
    (reward,) = SpecScorer(task)(problem, ["<answer>5</answer>"], [10])
    assert reward.value == pytest.approx(2 * reward.info["task"] + 1.0)
    own = ["--task.reward", "math-verify", "--task.rewards", "math-verify", "1", "task", "1"]
    assert read_recipe([str(weighed), *own], "april train").task.weights == {"math-verify": 1.0, "task": 1.0}
    alone = read_recipe([str(weighed), "--task.rewards", "--task.reward", "math-verify"], "april train").task
    assert alone.weights == {"math-verify": 1.0}


def test_parameters_of_a_dataset_are_read_as_json(recipe: Path) -> None:
    flags = ["--task.params", "max_value", "7", "min_numbers", "2", "name", "some text", "on", "true"]
    params = read_recipe([str(recipe), *flags], "april train").task.params
    assert params == {"max_value": 7, "min_numbers": 2, "name": "some text", "on": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task.rewards", "task", "1", "math-verify"], "'math-verify' has none"),
        (["--task.rewards", "task", "much"], "much"),
        (["--task.reward", "math-verify"], "rewards are set too"),
    ],
)
def test_invalid_tables_are_refused(
    weighed: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("train", str(weighed), *flags) == 2
    assert message in "".join(capsys.readouterr())


def test_every_ready_made_reward_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("algorithms") == 0
    said = capsys.readouterr().out
    for path in ("task", "math-verify", "april.tasks.format:boxed", "april.tasks.length:relative"):
        assert f"\n{path}\n" in said
    for value in get_args(RouterReplay):
        assert f"\n{value}\n" in said
    assert "[task] image_column" in said
    assert "_" not in said.partition("april.tasks.format:answered")[2].replace("per_thousand", "").replace(
        "my_rewards", ""
    ), "no private function is offered"
