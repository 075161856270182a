"""The policy, records, rewards, environments and tools of a recipe are found by one rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from april.commands.arguments import override
from april.config.reading import load_recipe
from april.config.recipe import Recipe, recipe_from_dict
from april.tasks.build import build_task
from april.tasks.reward_function import load_function

RECIPE = """
[model]
path = "policy"
[task]
kind = "records"
path = "data.jsonl"
eval_path = "test.jsonl"
reward = "{reward}"
[environment]
path = "worlds:World"
tools = "tools.py:add,subtract"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's folder, while the current directory is another one."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (folder / "policy").mkdir(parents=True)
    (folder / "package").mkdir()
    elsewhere.mkdir()
    for name in ("worlds.py", "tools.py", "package/__init__.py"):
        (folder / name).write_text("")
    for name in ("data.jsonl", "test.jsonl"):
        (folder / name).write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    (folder / "my_rewards.py").write_text("def score(response, answer): return 2.5\n")
    (folder / "package" / "rewards.py").write_text(
        "from .own import VALUE\ndef score(response, answer): return VALUE\n"
    )
    (folder / "package" / "own.py").write_text("VALUE = 3.5\n")
    monkeypatch.chdir(elsewhere)
    return folder


def recipe(folder: Path, reward: str) -> Recipe:
    (folder / "recipe.toml").write_text(RECIPE.format(reward=reward))
    return load_recipe(folder / "recipe.toml")


@pytest.mark.parametrize(
    ("reward", "file", "value"),
    [
        ("my_rewards.py:score", "my_rewards.py", 2.5),
        ("my_rewards:score", "my_rewards.py", 2.5),
        ("my_rewards.score", "my_rewards.py", 2.5),
        ("package.rewards:score", "package/rewards.py", 3.5),
        ("../project/my_rewards.py:score", "my_rewards.py", 2.5),
    ],
)
def test_paths_are_relative_to_the_recipe(folder: Path, reward: str, file: str, value: float) -> None:
    found = recipe(folder, reward)
    assert found.model.path == str(folder / "policy")
    assert (found.task.path, found.task.eval_path) == (str(folder / "data.jsonl"), str(folder / "test.jsonl"))
    assert found.environment.path == f"{folder / 'worlds.py'}:World"
    assert found.environment.tools == f"{folder / 'tools.py'}:add,subtract"
    assert found.task.reward == f"{folder / file}:score"
    task = build_task(recipe_from_dict(found.to_dict()).task)  # as a resumed run and a worker process do
    assert task.score(task.problem(0), "4") == value


def test_paths_of_weighted_rewards_are_relative_to_the_recipe(folder: Path) -> None:
    (folder / "recipe.toml").write_text(
        '[task]\nkind = "reasoning_gym"\nname = "gcd"\n[task.rewards]\n"math-verify" = 1.0\n"my_rewards:score" = 0.5\n'
    )
    found = load_recipe(folder / "recipe.toml")
    assert found.task.rewards == {"math-verify": 1.0, f"{folder / 'my_rewards.py'}:score": 0.5}


def test_paths_in_flags_are_relative_to_the_current_directory(folder: Path) -> None:
    flags = ["--task.reward", "../project/my_rewards.py:score", "--model.path", "../project/policy"]
    found = override(Recipe(), flags, "april train RECIPE", "")
    assert found.task.reward == f"{folder / 'my_rewards.py'}:score"
    assert found.model.path == str(folder / "policy")


def test_names_that_are_no_files_stay(folder: Path) -> None:
    assert recipe(folder, "april.tasks.format:boxed").task.reward == "april.tasks.format:boxed"
    assert recipe(folder, "math-verify").task.reward == "math-verify"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import a_module_that_is_missing", r"importing it failed: ModuleNotFoundError: .*bad.py, line 1"),
        ("1 / 0", r"importing it failed: ZeroDivisionError: division by zero \(.*bad.py, line 1\)"),
        ("def score(:", r"importing it failed: SyntaxError: .*bad.py, line 1"),
        ("import sys\nsys.exit(0)", r"importing it failed: SystemExit: 0 \(.*bad.py, line 2\)"),
    ],
)
@pytest.mark.parametrize("reward", ["bad:score", "bad.py:score", "../elsewhere/bad.py:score"])
def test_a_reward_module_that_cannot_be_imported_is_named(
    folder: Path, content: str, message: str, reward: str
) -> None:
    Path("bad.py").write_text(content)
    with pytest.raises(ValueError, match=f"^reward = {reward!r}: {message}"):
        load_function(reward)
