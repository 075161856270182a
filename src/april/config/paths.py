"""Paths in a recipe.

Invariant: one rule locates the policy, records, rewards, environments and tools: the recipe's directory first, then the
current directory. File names become absolute, so that workers and resumed runs find them from any directory.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from april.config.recipe import Recipe
from april.config.settings.environment_settings import VERIFIERS


def anchor(recipe: Recipe, folder: Path) -> None:
    """Make every path in `recipe` that exists in `folder` absolute; leave other paths unchanged."""
    recipe.model.path = _path(folder, recipe.model.path)
    own, task = recipe.environment, recipe.task
    if own.is_verifiers:
        own.path = VERIFIERS + _path(folder, own.path.removeprefix(VERIFIERS))
        if task.kind == "verifiers":
            task = dataclasses.replace(task, name=own.path, params=own.params)
    else:
        own.path = _object(folder, own.path)
    own.tools = _object(folder, own.tools)
    own.function, own.score = _object(folder, own.function), _object(folder, own.score)
    own.command = tuple(_path(folder, word) for word in own.command)
    recipe.task = dataclasses.replace(
        task,
        path=task.path and _path(folder, task.path),
        eval_path=task.eval_path and _path(folder, task.eval_path),
        reward=_object(folder, task.reward),
        rewards={_object(folder, name): weight for name, weight in task.rewards.items()},
    )


def _path(folder: Path, name: str) -> str:
    found = os.path.join(folder, name)
    return os.path.realpath(found) if name and os.path.exists(found) else name


def _object(folder: Path, name: str) -> str:
    """Return `FILE.py:NAME` or `package.module:NAME` as `/absolute/FILE.py:NAME` if the file is in `folder`."""
    place, colon, names = name.partition(":") if ":" in name else name.rpartition(".")
    file = place if place.endswith(".py") else place.replace(".", "/") + ".py"
    found = os.path.join(folder, file)
    return f"{os.path.realpath(found)}:{names}" if colon and place and os.path.isfile(found) else name
