"""Metrics of a run: `metrics.jsonl` in its directory, one flat record per step. All other displays are views of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from april.reporting.step_log import StepLog, scan

FILE_NAME = "metrics.jsonl"


class MetricsLog(StepLog):
    """Appends to `metrics.jsonl`; a second record of a step adds to the first. For `resume_step` see `StepLog`."""

    def __init__(self, directory: Path | str, resume_step: int | None = None) -> None:
        super().__init__(Path(directory) / FILE_NAME, resume_step)


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """The run's metrics in step order, one record per step; records of the same step are merged, the later winning.

    Raises:
        FileNotFoundError: the directory holds no metrics.
    """
    path = Path(directory) / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {directory} is not the directory of a run")
    steps: dict[int, dict[str, Any]] = {}
    for _, _, record in scan(path):
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def last_step(directory: Path | str) -> int:
    """The latest step in the run's metrics; -1 if there is none."""
    path = Path(directory) / FILE_NAME
    return max((record["step"] for _, _, record in scan(path)), default=-1) if path.exists() else -1
