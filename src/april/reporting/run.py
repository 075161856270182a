"""Data of a run's directory for its report, during or after the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.reporting import trace
from april.reporting.metrics import condensed, is_number
from april.reporting.metrics_log import read_metrics
from april.reporting.step_log import scan
from april.reporting.totals import Totals

Metrics = Mapping[str, Any]
Value = float | None


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Summary of a step's trace; the spans stay in the file, from byte `offset`."""

    step: int
    offset: int
    lengths: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    interrupted: int
    resumed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """Data to report: `metrics` by step, `steps` with training, and `totals` over all.

    `summary` is empty until the run has ended.
    """

    directory: Path
    metrics: list[Metrics]
    steps: list[Metrics]
    totals: Totals
    traced: list[TracedStep]
    summary: Metrics

    @classmethod
    def read(cls, directory: Path) -> Run:
        """
        Raises:
            FileNotFoundError: the directory holds no `metrics.jsonl`.
        """
        metrics: list[Metrics] = list(read_metrics(directory))
        summary_file = directory / "summary.json"
        summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.exists() else {}
        steps = [record for record in metrics if record["step"] > 0]
        return cls(directory, metrics, steps, Totals.of(metrics), _traced_steps(directory / trace.FILE_NAME), summary)

    def evaluations(self, name: str) -> list[float]:
        """Return the values of a metric in all evaluations, in order."""
        return measured(self.metrics, name)

    def load(self, step: TracedStep) -> trace.StepTrace:
        with (self.directory / trace.FILE_NAME).open("rb") as file:
            file.seek(step.offset)
            record: trace.StepTrace = json.loads(file.readline())
            return record


def _traced_steps(path: Path) -> list[TracedStep]:
    if not path.exists():
        return []
    steps = []
    for offset, _, record in scan(path):
        spans = record["spans"]
        steps.append(
            TracedStep(
                record["step"],
                offset,
                np.array(record["lengths"], dtype=np.int64),
                np.array(record["truncated"], dtype=bool),
                sum(span["outcome"] == "interrupted" for span in spans),
                sum(span["resumed"] for span in spans),
                trace.duration(trace.StepTrace(**record)),  # type: ignore[typeddict-item]
            )
        )
    return steps


def condense(records: Sequence[Metrics], limit: int) -> list[Metrics]:
    """At most `limit` records, each of equally many steps: see `metrics.condensed`."""
    size = -(-len(records) // limit)
    if size <= 1:
        return list(records)
    return [_merge(records[start : start + size]) for start in range(0, len(records), size)]


def _merge(records: Sequence[Metrics]) -> Metrics:
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    merged = {name: condensed(name, [record.get(name) for record in records]) for name in names}
    return {"step": records[-1]["step"], **merged}


def values(records: Sequence[Metrics], name: str) -> list[Value]:
    """One value per record; None where it was not measured."""
    return [float(record[name]) if is_number(record.get(name)) else None for record in records]


def measured(records: Sequence[Metrics], name: str) -> list[float]:
    """The values where it was measured."""
    return [value for value in values(records, name) if value is not None]
