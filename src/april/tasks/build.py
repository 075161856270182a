"""From settings to a task."""

from __future__ import annotations

from dataclasses import fields

from april.tasks.scoring import SpecScorer
from april.tasks.task import Task, TaskSpec


def in_recipe(error: ValueError) -> str:
    """What `build_task` found, to a recipe's reader: a setting gets its section's name, a file stands for itself."""
    setting = str(error).partition(" ")[0].rstrip(":")
    return f"task.{error}" if setting in {field.name for field in fields(TaskSpec)} else f"task: {error}"


def build_task(spec: TaskSpec) -> Task:
    """The task that `spec` describes.

    Raises:
        ValueError: a setting or a file is wrong; the message names the setting, or the file and line.
    """
    # Imported here so that a task pays only for the library it needs: reasoning-gym alone takes seconds to import.
    if spec.kind == "reasoning_gym":
        from april.tasks.reasoning_gym import ReasoningGymTask

        scorer = SpecScorer(spec)
        generated = ReasoningGymTask(spec, scorer)
        scorer.check([generated.problem(0)])
        return generated
    if spec.kind == "environment":
        from april.tasks.episode import EpisodeTask

        return EpisodeTask(spec)
    if spec.kind == "verifiers":
        from april.tasks.verifiers import verifiers_task

        return verifiers_task(spec)
    if spec.kind == "nemo_gym":
        from april.tasks.nemo_gym import nemo_gym_task

        return nemo_gym_task(spec)
    from april.tasks.records import RecordsTask

    scorer = SpecScorer(spec)
    records = RecordsTask(spec, scorer)
    scorer.check(records.problems())
    return records
