"""Trace of every sample in each step: `trace.jsonl` in the run directory, and its conversion to a Chrome trace.

Times are seconds from the step's start, up to the moment the step was satisfied and what still ran was interrupted.

Engines do not report the time at which a sample got a slot. `waits` computes the earliest possible time from the times
of submission, of the first tokens and of freed slots, if slots are assigned in order of submission.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from april.reporting.step_log import StepLog, scan
from april.rollout.batch import RolloutBatch
from april.rollout.request_interval import RequestInterval

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
    turn: NotRequired[list[tuple[str, float, float]]]
    """Phases of the training step if engine and trainer share devices: name, beginning and end, in seconds since the
    rollout ended."""
    choices: NotRequired[list[list[float]]]
    """Of each N' that automatic admission thought about: N', expected consumed tokens/s, expected mean staleness."""


class TraceWriter(StepLog):
    """Appends one `StepTrace` per step to `trace.jsonl`; for `resume_step` see `StepLog`."""

    def __init__(self, directory: Path | str, resume_step: int | None = None) -> None:
        super().__init__(Path(directory) / FILE_NAME, resume_step)


def trace_of(
    number: int, step: RolloutBatch, slots: int, turn: Sequence[tuple[str, float, float]] = ()
) -> dict[str, Any]:
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
        **({"turn": [[name, round(began, 4), round(ended, 4)] for name, began, ended in turn]} if turn else {}),
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


def write_chrome_trace(
    directory: Path | str, path: Path | str | None = None, steps: Iterable[int] | None = None
) -> Path:
    """Write a run's trace in the Trace Event format, which Perfetto and chrome://tracing open.

    Args:
        directory: the run directory.
        path: the file to write; by default `chrome_trace.json` in the run directory.
        steps: the steps to export; all of them by default.
    """
    target = Path(path) if path is not None else Path(directory) / "chrome_trace.json"
    wanted = None if steps is None else set(steps)
    records = [record for record in read_trace(directory) if wanted is None or record["step"] in wanted]
    target.write_text(json.dumps(chrome_trace(records), separators=(",", ":")), encoding="utf-8")
    return target


def chrome_trace(records: Sequence[StepTrace]) -> dict[str, Any]:
    """Step traces as one Trace Event object, one step after the other without the training in between.

    The process "steps" shows each rollout, its interruption, and overlapped training; the process "engine" has
    one thread per slot and counts the samples decoding and waiting. Timestamps are in microseconds.
    """
    events: list[dict[str, Any]] = [
        _name("process_name", 1, 0, "steps"),
        _name("process_name", 2, 0, "engine"),
    ]
    lanes = 0
    offset = 0.0
    for record in records:
        end = duration(record)
        events.append(_complete(f"step {record['step']}", 1, 0, offset, end, {"samples": len(record["spans"])}))
        resumed_at = record.get("resumed_at")
        if record["interrupt_at"] is not None and resumed_at is not None:
            update = resumed_at - record["interrupt_at"]
            events.append(_complete("training on the step before", 1, 1, offset, record["interrupt_at"], {}))
            events.append(_complete("weight update", 1, 1, offset + record["interrupt_at"], update, {}))
        elif record["interrupt_at"] is not None:
            events.append(
                {"ph": "i", "s": "g", "name": "step satisfied", "pid": 1, "tid": 0}
                | {"ts": _microseconds(offset + record["interrupt_at"])}
            )
        for lane, span in assign_slots(record["spans"]):
            lanes = max(lanes, lane + 1)
            start, label = decoding_start(span), "resumed" if span["resumed"] else "new"
            events.append(
                _complete(span["sample"], 2, lane + 1, offset + start, span["end"] - start, dict(span))
                | {"cat": f"{span['outcome']},{label}"}
            )
        for time, decoding, waiting in load(record["spans"]):
            count = {"decoding": decoding, "waiting": waiting}
            events.append(
                {"ph": "C", "name": "samples", "pid": 2, "tid": 0, "ts": _microseconds(offset + time), "args": count}
            )
        offset += end
    events += [_name("thread_name", 2, lane + 1, f"slot {lane}") for lane in range(lanes)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def duration(record: StepTrace) -> float:
    """Seconds from the step's start to its end."""
    return float(record.get("end") or max((span["end"] for span in record["spans"]), default=0.0))


def decoding_start(span: SpanRecord) -> float:
    """When the sample had a slot; the end of the span if it never sampled a token."""
    return span["end"] if span["queued"] is None else min(span["start"] + span["queued"], span["end"])


def assign_slots(spans: Iterable[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    """Each span that decoded with a lane for it, the lowest that is free: no two on a lane overlap."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    decoded = (span for span in spans if span["queued"] is not None)
    for span in sorted(decoded, key=lambda span: (decoding_start(span), span["end"])):
        while busy and busy[0][0] <= decoding_start(span):
            heapq.heappush(free, heapq.heappop(busy)[1])
        # Without a free lane every lane is busy, so their number is the next lane.
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span["end"], lane))
        yield lane, span


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


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _complete(name: str, pid: int, tid: int, start: float, length: float, args: Mapping[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "args": dict(args)}
    return event | {"ts": _microseconds(start), "dur": _microseconds(length)}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
