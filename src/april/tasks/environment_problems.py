"""Problems of environments of other packages, whose rewards come from the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from april.tasks.episode import NoScorer
from april.tasks.records import eval_count, hold_out
from april.tasks.task import Problem, Scorer, Split, Task, TaskSpec


class EnvironmentProblems(Task):
    """Problems that stay at their positions, less those that are held out.

    Args:
        name: name of the task.
        problems: all problems, in the order of their source.
        spec: its settings `size`, `eval_size`, `seed` and `correct_at`.
        content: see `hold_out`.
        skipped: records that make no problem.

    Raises:
        ValueError: no problem is left to train on.
    """

    def __init__(
        self,
        name: str,
        problems: list[Problem],
        spec: TaskSpec,
        content: Callable[[Problem], Any],
        skipped: int = 0,
    ) -> None:
        self.name = name
        self.stored = True
        self.skipped = skipped
        self.scorer: Scorer = NoScorer(spec.correct_at)
        train, held_out = hold_out(problems, eval_count(spec.eval_size, len(problems)), spec.seed, content)
        self._problems: dict[Split, list[Problem]] = {"train": train[: spec.size], "eval": held_out}
        self.eval_size = len(held_out)
        if not train:
            raise ValueError(f"{name} has {len(problems)} problems, and none is left to train on; lower eval_size")

    def __len__(self) -> int:
        return len(self._problems["train"])

    def problem(self, index: int, split: Split = "train") -> Problem:
        return self._problems[split][index]
