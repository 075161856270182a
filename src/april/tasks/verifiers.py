"""Problems from the task set of a verifiers environment.

Invariants:
- a problem holds the data of its task, so that its environment needs no task set;
- the position of a problem is the position of its task in the task set, less the tasks that are held out.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from april.extras import missing_package
from april.loading import importable
from april.rollout.json_types import json_types
from april.rollout.user_code.user_code import in_one_line
from april.secrets import resolved
from april.tasks.environment_problems import EnvironmentProblems
from april.tasks.task import Messages, Problem, TaskSpec


def verifiers_task(spec: TaskSpec) -> EnvironmentProblems:
    """Return the tasks of a task set as problems.

    Args:
        spec: its settings `name`, the environment's path; `params`, the environment's settings, whose table `taskset`
            counts; `size`, `eval_size`, `seed`, `system_prompt` and `correct_at`.

    Raises:
        ValueError: the task set cannot be loaded, or has too few tasks.
    """
    name = Path((spec.name or "").removeprefix("verifiers:")).stem
    problems = [_problem(name, spec, index, task) for index, task in enumerate(_tasks(spec))]
    return EnvironmentProblems(name, problems, spec, _content)


def _tasks(spec: TaskSpec) -> list[Any]:
    """Load the task set."""
    path = spec.name or ""
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
    except ModuleNotFoundError as error:
        raise ValueError(missing_package(error, f"environment.path = {path!r}")) from None
    name = importable(path.removeprefix("verifiers:"))
    params: dict[str, Any] = resolved(dict(spec.params.get("taskset", {})), os.environ)
    try:
        tasks = load_taskset(taskset_config_type(name).model_validate({**params, "id": name}))
        if tasks.bounded:
            return list(tasks)
    except Exception as error:  # import errors of the user's module, wrong settings, and data that cannot be read
        raise ValueError(f"environment.path = {path!r}: {in_one_line(error)}") from None
    if spec.size is None:
        raise ValueError(f"size is not set: the tasks of {path} have no end; set how many to train on")
    held_out = int(spec.eval_size or 0)
    return list(islice(tasks, spec.size + held_out))


def _problem(name: str, spec: TaskSpec, index: int, task: Any) -> Problem:
    data = json_types(task.data.model_dump(mode="json", exclude_none=True), "a task")
    prompt = task.data.prompt_text or task.data.description or task.data.name or "(the environment begins)"
    asked: Messages = [{"role": "user", "content": prompt}]
    if task.data.system_prompt:
        asked.insert(0, {"role": "system", "content": task.data.system_prompt})
    return Problem(f"{name}:{index}", spec.with_system_prompt(asked), metadata={"task": data})


def _content(problem: Problem) -> Any:
    """Return the task without its position."""
    return {name: value for name, value in problem.metadata["task"].items() if name != "idx"}
