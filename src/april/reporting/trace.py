"""Trace of every sample in each step: `trace.jsonl` in the run directory.

Times are seconds from the step's start, up to the moment the step was satisfied and what still ran was interrupted.

Engines do not report the time at which a sample got a slot. `waits` computes the earliest possible time from the times
of submission, of the first tokens and of freed slots, if slots are assigned in order of submission.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from april.reporting.step_log import StepLog, scan
from april.rollout.batch import RequestInterval, RolloutBatch

FILE_NAME = "trace.jsonl"

StayOutcome = Literal["finished", "interrupted", "waiting", "failed", "turn", "running"]
"""End of a span: the sample finished; was interrupted while decoding; never got a slot; its request failed; its turn
ended, and the environment computes the observation; the step ended while the sample decodes (overlapped training)."""


class SpanRecord(TypedDict):
    """One sample's interval in the engine, from `submit` until it finished or was interrupted."""

    sample: str
    """`Sample.id`: group and index."""
    group: int
    start: float
    end: float
    before: int
    """Response tokens the sample had when the span started; positive if it was resumed halfway."""
    after: int
    """Response tokens it had at the end."""
    queued: float | None
    """Seconds until it had a slot, see `waits`; None if it never sampled a token."""
    outcome: StayOutcome
    resumed: bool
    """The sample came from the buffer rather than from a new prompt."""


class StepTrace(TypedDict):
    step: int
    lengths: list[int]
    """Response length of each sample the step trained on."""
    truncated: list[bool]
    """For each of them, whether its budget ran out."""
    tokens_by_age: list[int]
    """Tokens trained on that were sampled 0, 1, 2, … weight updates earlier."""
    slots: int
    spans: list[SpanRecord]
    interrupt_at: float | None
    """Time at which the complete step, or the weight update of overlapped training, interrupted unfinished samples;
    None if there were none."""
    resumed_at: NotRequired[float | None]
    """Time at which generation resumed after a weight update within the step; None if it did not resume."""
    end: NotRequired[float]
    choices: NotRequired[list[list[float]]]
    """Of each N' that automatic admission thought about: N', expected consumed tokens/s, expected mean staleness."""


class TraceWriter(StepLog):
    """Appends one `StepTrace` per step to `trace.jsonl`; for `resume_step` see `StepLog`."""

    def __init__(self, directory: Path | str, resume_step: int | None = None) -> None:
        super().__init__(Path(directory) / FILE_NAME, resume_step)


def trace_of(number: int, step: RolloutBatch, slots: int) -> dict[str, Any]:
    """The record of training step `number`."""
    samples = [sample for group in step.groups for sample in group.samples]
    return {
        "step": number,
        "lengths": [sample.policy_tokens for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "tokens_by_age": step.tokens_by_age.tolist(),
        "slots": slots,
        "spans": [
            _record(span, queued)
            for span, queued in zip(step.request_intervals, waits(step.request_intervals, slots), strict=True)
        ],
        "interrupt_at": step.interrupted_at,
        "resumed_at": step.resumed_at,
        "end": step.seconds,
        "choices": [list(one) for one in step.plan.alternatives],
    }


def waits(spans: Sequence[RequestInterval], slots: int) -> list[float | None]:
    """For each stay, in the order of submission, the seconds until it had a slot; None if it never sampled a token.

    A sample runs from its submission if fewer than `slots` do, else from the moment at which the next slot became free;
    and in any case before its first tokens were handed out, which with a long `stream_interval` is much later.
    """
    until: list[float] = []
    waited: list[float | None] = []
    for span in spans:
        if span.queued is None:
            waited.append(None)
            continue
        free = span.start if len(until) < slots else max(span.start, heapq.heappop(until))
        heapq.heappush(until, span.end)
        waited.append(min(free - span.start, span.queued))
    return waited


def _record(span: RequestInterval, queued: float | None) -> SpanRecord:
    waiting = span.queued is None and span.outcome == "interrupted"
    return {
        "sample": span.sample_id,
        "group": span.group_id,
        "start": round(span.start, 4),
        "end": round(span.end, 4),
        "before": span.before,
        "after": span.after,
        "queued": None if queued is None else round(queued, 4),
        "outcome": "waiting" if waiting else span.outcome,
        "resumed": span.before > 0 and not span.running,
    }


def read_trace(directory: Path | str) -> Iterator[StepTrace]:
    """The run's step traces, one at a time: a long run's trace is larger than its report. Nothing if there is none."""
    path = Path(directory) / FILE_NAME
    if path.exists():
        for _, _, record in scan(path):
            yield StepTrace(**record)  # type: ignore[typeddict-item]


def duration(record: StepTrace) -> float:
    """Seconds from the step's start to its end."""
    return float(record.get("end") or max((span["end"] for span in record["spans"]), default=0.0))


def decoding_start(span: SpanRecord) -> float:
    """When the sample had a slot; the end of the span if it never sampled a token."""
    return span["end"] if span["queued"] is None else min(span["start"] + span["queued"], span["end"])


def load(spans: Iterable[SpanRecord]) -> list[tuple[float, int, int]]:
    """(time, samples decoding, samples waiting) at every change, in time order."""
    changes: dict[float, list[int]] = {}
    for span in spans:
        start = decoding_start(span)
        for time, decoding, waiting in ((span["start"], 0, 1), (start, 1, -1), (span["end"], -1, 0)):
            # Changes at one time are one point: a slot that passes from one sample to the next shows no dip.
            change = changes.setdefault(time, [0, 0])
            change[0] += decoding
            change[1] += waiting
    points, decoding, waiting = [], 0, 0
    for time in sorted(changes):
        decoding, waiting = decoding + changes[time][0], waiting + changes[time][1]
        points.append((time, decoding, waiting))
    return points
