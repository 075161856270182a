"""Log of a run: writes each step to files, trackers and display, and the summary.

Invariants:
- a step is recorded once, by one call, and everything that shows it takes it from that record;
- `metrics.jsonl` holds a step before anything else shows it;
- the totals in a checkpoint are the totals of the records up to it (see `Totals`).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from april.disk import write_whole
from april.reporting.alarms import Alarms
from april.reporting.completions import Completion, CompletionsWriter, Decode, most_informative
from april.reporting.faults import FaultLog
from april.reporting.formats import clock as clock_time
from april.reporting.metrics import busy_seconds, counted, failures_in, show
from april.reporting.metrics_log import MetricsLog
from april.reporting.progress import Progress
from april.reporting.report import write_report
from april.reporting.step_log import plain
from april.reporting.totals import Totals
from april.reporting.trace import TraceWriter, trace_of
from april.reporting.tracker_feed import end_feeds, start_feeds
from april.reporting.trackers import Ending, TrackedRun
from april.rollout.batch import RolloutBatch
from april.rollout.trajectory.group import Group

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
MOST_TRACKED = 16
"""Completions of a step that trackers get; `completions/` has all of them."""


class RunLog:
    """Records a run. Use as a context manager.

    Args:
        directory: the run directory.
        recipe: the resolved recipe, as JSON types.
        trackers: any of `TRACKERS`.
        project: project name in wandb and trackio.
        resume: resume the run in the directory and cut records after `state`; without a state, all records.
        state: result of `state_dict` at the checkpoint.
        progress: display of the run.
        clock: monotonic clock in seconds.
        decode: converts token ids to text, for the table of completions; None writes no table.
        show_completions: number of completions per step to show on `progress`.
        devices: each GPU of the run, and its task.

    Raises:
        ValueError, ModuleNotFoundError: a tracker cannot be used; see `check_trackers`.
        FileExistsError: the directory holds a run and `resume` is False.
    """

    def __init__(
        self,
        directory: Path | str,
        recipe: Mapping[str, Any],
        trackers: Sequence[str] = (),
        project: str = "april",
        resume: bool = False,
        state: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
        decode: Decode | None = None,
        show_completions: int = 0,
        devices: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.directory = Path(directory)
        self.recipe = recipe
        self.progress = progress
        self.steps: int = state["steps"] if state else 0
        """Training steps recorded so far."""
        self.evaluations: list[dict[str, float]] = list(state["evaluations"]) if state else []
        """One record per evaluation: `step`, `training_seconds` (see `busy_seconds`) before it, and its metrics."""
        self.totals = Totals(state["totals"] if state else None)
        self._trained = 0.0
        """Seconds that training on the latest step took."""
        self._alarms = Alarms()
        self._clock = clock
        self._show_completions = show_completions
        self._devices = devices
        self._ending: Ending = "stopped"
        self._began = clock() - (self.totals.get("seconds") or 0.0)
        # -1 cuts all records: the run died before its first checkpoint, and all its steps are repeated.
        kept = None if not resume else self.steps if state else -1
        with ExitStack() as stack:
            (self.directory / SUMMARY).unlink(missing_ok=True)  # of an ended run that is resumed
            self._metrics = stack.enter_context(MetricsLog(self.directory, kept))
            self._trace = stack.enter_context(TraceWriter(self.directory, kept))
            self._faults = stack.enter_context(FaultLog(self.directory, kept))
            self._trackers = start_feeds(trackers, TrackedRun(self.directory, project, recipe, kept))
            stack.callback(lambda: end_feeds(self._trackers, self._ending))
            # After the trackers, so that it is closed before them and its last rows still reach them.
            self._completions = decode and stack.enter_context(
                CompletionsWriter(self.directory, decode, self._take_rows, kept)
            )
            self._stack = stack.pop_all()

    def step(
        self,
        step: RolloutBatch,
        measured: Mapping[str, Any],
        slots: int,
        turn: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        """Record the next training step.

        Args:
            step: the rollout step it trained on.
            measured: further metrics of the step, by name.
            slots: slots of the engine.
            turn: phases in which engine and trainer exchanged shared devices, as (name, beginning, end) in seconds
                since the rollout ended.
        """
        self.steps += 1
        total = (self.totals.get("consumed_tokens") or 0) + step.consumed_tokens
        record = self._record({"consumed_tokens": total, **metrics_of(step), **self._overlap(step), **measured})
        self._trained = record.get("train_seconds") or 0.0
        self._trace.write(trace_of(self.steps, step, slots, turn))
        warnings = self._alarms.observe(record)
        self._faults.write_step(self.steps, step, measured, warnings)
        if self.progress:
            self.progress.step(record, failures_in(self.totals.values()))
            for warning in warnings:
                self.progress.note(f"warning: {warning}")
        if self._completions:
            self._completions.write(step.groups, self.steps, step.version)

    def _overlap(self, step: RolloutBatch) -> dict[str, float]:
        """Return the seconds of the rollout that overlapped with the previous step's training and weight update."""
        return {} if step.resumed_at is None else {"overlap_seconds": min(step.resumed_at, self._trained)}

    def evaluation(self, measured: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Record an evaluation on held-out problems after the latest step, with its sampled groups."""
        spent = busy_seconds(self.totals.values())
        record = self._record(measured)
        self.evaluations.append({"step": self.steps, "training_seconds": spent, **plain(measured)})
        if self.progress:
            self.progress.evaluation(record)
        if self._completions and groups:
            self._completions.write(groups, self.steps, version=0, held_out=True)

    def _record(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        record: dict[str, Any] = plain({"step": self.steps, "seconds": self._clock() - self._began, **metrics})
        self._metrics.write(record)
        self.totals.add(record)
        for tracker in self._trackers:
            tracker.notify()
        return record

    def _take_rows(self, rows: list[Completion]) -> None:
        """In the writer's thread: show some, and send some to the trackers."""
        if self.progress and self._show_completions:
            self.progress.completions(list(most_informative(rows, self._show_completions)))
        for tracker in self._trackers:
            tracker.table(rows[0]["step"], list(most_informative(rows, MOST_TRACKED)))

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run: every metric aggregated over the run, and every evaluation."""
        return {
            "steps": self.steps,
            **plain(self.totals.values()),
            "evaluations": self.evaluations,
            "versions": versions(),
            "devices": [list(row) for row in self._devices],
            "recipe": self.recipe,
        }

    def finish(self) -> dict[str, Any]:
        """Write `summary.json` and the report; returns the summary."""
        summary = self.summary()
        if self._completions:
            self._completions.sync()
        # The summary marks the run as finished, so completions are on disk before it.
        write_whole(self.directory / SUMMARY, json.dumps(summary, indent=2))
        write_report(self.directory)
        self._ending = "finished"
        return summary

    def report(self) -> None:
        """Write the report of a run that has not finished; a report that cannot be written is no error."""
        try:
            write_report(self.directory)
        except (OSError, ValueError) as error:
            log.warning("no report: %s", error)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "evaluations": self.evaluations, "totals": self.totals.state_dict()}

    def sync(self) -> None:
        """Wait until every line is on disk."""
        if self._completions:
            self._completions.sync()
        for file in (self._metrics, self._trace, self._faults):
            file.sync()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._ending = "failed"
        self.close()


def metrics_of(step: RolloutBatch) -> dict[str, Any]:
    """The metrics that a rollout step has by itself."""
    samples = [sample for group in step.groups for sample in group.samples]
    rewards = np.array([sample.reward for group in step.groups for sample in group.outcomes])
    lengths = np.array([sample.policy_tokens for sample in samples])
    with np.errstate(over="ignore", invalid="ignore"):  # overflows become null in the record
        reward, reward_std = rewards.mean(), rewards.std()
    return {
        **step.metrics(),
        "reward": reward,
        "reward_std": reward_std,
        "frac_reward_zero_std": np.mean([len({s.reward for s in group.outcomes}) == 1 for group in step.groups]),
        "response_length_mean": lengths.mean(),
        "response_length_p50": np.percentile(lengths, 50),
        "response_length_p99": np.percentile(lengths, 99),
        "response_length_max": lengths.max(),
        "truncated_share": np.mean([sample.truncated for sample in samples]),
        "admission_reason": step.plan.reason,
        "groups_consumed": len(step.groups),
        "groups_quarantined": len(step.quarantined),
        "reward_failures": sum(failure.kind == "reward" for failure in step.failures),
        "reward_timeouts": sum(failure.kind == "reward timeout" for failure in step.failures),
        "filter_failures": sum(failure.kind == "filter" for failure in step.failures),
        "tokens_by_age": step.tokens_by_age.tolist(),
    }


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    """How a run ended, for its user."""
    found = [record["eval_reward"] for record in summary["evaluations"]]
    ended = f"{summary['steps']} steps and {clock_time(summary['seconds'])}"
    lines = [f"done after {ended}"]
    if found:
        lines = [f"held-out reward {show('eval_reward', found[0])} -> {show('eval_reward', found[-1])} in {ended}"]
    if failures := failures_in(summary):
        lines.append(f"survived: {counted(failures)}; which and why: faults.jsonl and the report")
    return lines


def versions() -> dict[str, str]:
    """The versions that a figure of this run depends on."""
    found = {"python": platform.python_version()}
    for name in ("april-rl", "torch", "transformers", "numpy", "reasoning-gym", "math-verify"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
