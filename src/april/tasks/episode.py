"""A task defined by its environment: an episode begins with a fixed prompt and the observation of `reset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from april.rollout.rewards import RewardError
from april.rollout.trajectory.reward import Reward
from april.tasks.task import Problem, Scorer, Split, Task, TaskSpec

SIZE, EVAL_SIZE = 10_000, 128


class EpisodeTask(Task):
    """Numbered problems with one prompt.

    Args:
        spec: its settings `prompt`, `system_prompt`, `size`, `eval_size` and `correct_at`.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.name = "environment"
        self.eval_size = EVAL_SIZE if spec.eval_size is None else int(spec.eval_size)
        self.scorer: Scorer = NoScorer(spec.correct_at)

    def __len__(self) -> int:
        return self.spec.size or SIZE

    def problem(self, index: int, split: Split = "train") -> Problem:
        return Problem(f"environment/{split}/{index}", self.spec.with_system_prompt(self.spec.prompt or ""))


class NoScorer:
    """Takes the place of a scorer: the environment alone rewards an episode."""

    def __init__(self, correct_at: float | None) -> None:
        self.scope: Literal["sample", "group"] = "sample"
        self.correct_at = correct_at

    def __call__(
        self, problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None = None
    ) -> list[Reward]:
        raise RewardError("this task has no reward of its own: its environment gives one")
