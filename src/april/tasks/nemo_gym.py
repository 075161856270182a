"""Problems from a file of NeMo Gym: records with `responses_create_params`, and what the server's verifier reads.

Invariant: a problem holds its whole record, which travels to the resources server as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.rollout.json_types import json_types
from april.tasks.bad_records import settle
from april.tasks.environment_problems import EnvironmentProblems
from april.tasks.hub import path_problem
from april.tasks.record_files import read_rows
from april.tasks.task import Messages, Problem, TaskSpec

PARAMETERS = "responses_create_params"


def nemo_gym_task(spec: TaskSpec) -> EnvironmentProblems:
    """Return the records of a file as problems.

    Args:
        spec: its settings `path`, `size`, `eval_size`, `seed`, `on_bad_record` and `correct_at`.

    Raises:
        ValueError: the file cannot be read, or its records are no data of NeMo Gym.
    """
    path = spec.path or ""
    if problem := path_problem(path):
        raise ValueError(f"path = {path!r}: {problem}")
    problems: list[Problem] = []
    bad: list[str] = []
    for line, record in read_rows(path, spec.subset, spec.split, "path"):
        try:
            if isinstance(record, ValueError):
                raise record
            problems.append(_problem(f"{Path(path).stem}:{line}", record))
        except ValueError as error:
            bad.append(f"{path}:{line}: {error}")
    settle(bad, len(problems) + len(bad), "records", spec.on_bad_record or "raise")
    if not problems:
        raise ValueError(f"path = {path!r}: there are no records in it")
    return EnvironmentProblems(Path(path).stem, problems, spec, lambda problem: dict(problem.metadata), len(bad))


def _problem(id: str, record: Mapping[str, Any]) -> Problem:
    asked = record.get(PARAMETERS)
    if not isinstance(asked, Mapping) or not asked.get("input"):
        raise ValueError(f"no {PARAMETERS} with an input: is this data of NeMo Gym?")
    return Problem(id, _messages(asked), metadata=json_types(dict(record), "a record"))


def _messages(asked: Mapping[str, Any]) -> Messages:
    """Return the messages of a request as text, for reports; the program sends the request itself."""
    first: Messages = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
    if isinstance(asked["input"], str):
        return [*first, {"role": "user", "content": asked["input"]}]
    for item in asked["input"]:
        if isinstance(item, Mapping) and item.get("role") in ("system", "developer", "user", "assistant"):
            role = "system" if item["role"] == "developer" else item["role"]
            first.append({"role": role, "content": _text(item.get("content"))})
    if not any(message["content"] for message in first):
        raise ValueError(f"{PARAMETERS}.input has no text")
    return first


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")
