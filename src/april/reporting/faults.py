"""Faults of a run: `faults.jsonl` in the run directory, one line for each step with faults.

Invariant: the size of a line is bounded; it counts the faults that it omits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from april.reporting.step_log import StepLog, scan
from april.rollout.batch import RolloutBatch

FILE_NAME = "faults.jsonl"
MOST = 20
"""Maximum number of different failures, and of quarantined groups, in a line."""
LONGEST = 500
"""Maximum number of characters of an error."""
KINDS = {
    "reward": "reward error",
    "reward timeout": "reward timeout",
    "filter": "dynamic filter failed",
    "engine": "engine request failed",
    "environment": "environment failed",
    "environment timeout": "environment took too long",
    "environment lost": "environment lost, and made anew",
    "environment restart": "episode begun again",
}


class FaultLog(StepLog):
    """Appends the faults of each step to `faults.jsonl`; for `resume_step` see `StepLog`."""

    def __init__(self, directory: Path | str, resume_step: int | None = None) -> None:
        super().__init__(Path(directory) / FILE_NAME, resume_step)

    def write_step(
        self, number: int, step: RolloutBatch, learned: Mapping[str, Any], warnings: Sequence[str] = ()
    ) -> None:
        """The faults of training step `number`, from its rollout and its training's metrics, and its alarms."""
        record = faults_of(step, learned) | ({"warnings": list(warnings)} if warnings else {})
        if record:
            self.write({"step": number, **record})


def faults_of(step: RolloutBatch, learned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the faults of a step as JSON types; empty without faults."""
    met = Counter((failure.kind, failure.error[:LONGEST]) for failure in step.failures)
    example = {(failure.kind, failure.error[:LONGEST]): failure.prompt_id for failure in step.failures}
    record: dict[str, Any] = {
        "failures": [
            {"kind": kind, "error": error, "times": times, "prompt": example[kind, error]}
            for (kind, error), times in met.most_common(MOST)
        ],
        "more_failures": sum(met.values()) - sum(times for _, times in met.most_common(MOST)),
        "quarantined": [
            {"group": q.group_id, "prompt": q.prompt_id, "reason": str(q.reason), "error": q.error[:LONGEST]}
            for q in step.quarantined[:MOST]
        ],
        "more_quarantined": max(0, len(step.quarantined) - MOST),
        "skipped_updates": int(learned.get("skipped_updates") or 0),
        "out_of_memory": int(learned.get("out_of_memory") or 0),
    }
    return {name: value for name, value in record.items() if value}


def read_faults(directory: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's `faults.jsonl`; none if there is no such file."""
    path = Path(directory) / FILE_NAME
    return [record for _, _, record in scan(path)] if path.exists() else []


def described(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Yield the faults of a record as pairs of event and cause."""
    lines = [
        (
            f"{failure['times']} × {KINDS[failure['kind']]}",
            f"{failure['error']} (prompt {failure['prompt']})",
        )
        for failure in record.get("failures", ())
    ]
    lines += [
        (f"group {q['group']} quarantined ({q['reason']})", f"{q['error']} (prompt {q['prompt']})")
        for q in record.get("quarantined", ())
    ]
    if more := record.get("more_failures", 0) + record.get("more_quarantined", 0):
        lines.append((f"{more} more", "left out here"))
    if skipped := record.get("skipped_updates"):
        lines.append((f"{skipped} × update skipped", "loss or gradient not finite; the batch is in skipped/"))
    lines += [("warning", warning) for warning in record.get("warnings", ())]
    if shortages := record.get("out_of_memory"):
        lines.append((f"{shortages} × out of memory", "micro-batches were made smaller"))
    return lines
