"""What a run writes survives crashes and resumes, and reads back as it was written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.reporting.metrics_log import MetricsLog, read_metrics
from april.reporting.timeline import timeline
from april.reporting.trace import chrome_trace, read_trace, waits, write_chrome_trace
from april.rollout.request_interval import RequestInterval
from tests.reporting.conftest import simulate, write_run


def steps(directory: Path) -> list[int]:
    return [record["step"] for record in read_metrics(directory)]


def test_metrics_are_read_back_as_json(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write({"step": 0, "accuracy": 0.5})
        log.write({"step": 1, "reward": np.float32(0.25), "tokens_by_age": [3, 1], "loss": float("nan")})
        log.write({"step": 1, "eval_reward": 0.75})
    known = {"step": 1, "reward": 0.25, "tokens_by_age": [3, 1], "loss": None, "eval_reward": 0.75}
    assert read_metrics(tmp_path)[1] == known


def test_a_resumed_run_holds_each_step_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as writer:
        for step in range(5):
            writer.write({"step": step, "loss": 0.0})
    with MetricsLog(tmp_path, resume_step=2) as writer:
        writer.write({"step": 3, "loss": 1.0})
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert read_metrics(tmp_path)[3]["loss"] == 1.0


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "garbage", "\x00\x00\x00"])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    with MetricsLog(tmp_path) as writer:
        for step in range(3):
            writer.write({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert steps(tmp_path) == [0, 1, 2]
    with MetricsLog(tmp_path, resume_step=2) as writer:
        writer.write({"step": 3})
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        MetricsLog(tmp_path, resume_step=1)


def test_a_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    MetricsLog(tmp_path).write({"step": 0})
    with pytest.raises(FileExistsError, match="already holds a run"):
        MetricsLog(tmp_path)


def test_the_chrome_trace_has_every_decoding_sample_with_at_most_one_per_slot(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=3)
    write_run(tmp_path, metrics, traces, summary)
    assert list(read_trace(tmp_path)) == traces
    events = json.loads(write_chrome_trace(tmp_path).read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert len(bars) == sum(span["queued"] is not None for trace in traces for span in trace["spans"])
    for lane in {bar["tid"] for bar in bars}:
        mine = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["tid"] == lane)
        assert all(end <= start + 0.2 for (_, end), (start, _) in pairwise(mine))
    assert chrome_trace([])["traceEvents"]


def test_overlapped_training_has_a_lane_and_the_update_is_in_both_lanes(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=2)
    alternating = timeline(traces[1])
    middle = traces[1]["end"] / 2
    traces[1] |= {"interrupt_at": middle, "resumed_at": middle + 0.25}
    write_run(tmp_path, metrics, traces, summary)
    beside = timeline(list(read_trace(tmp_path))[1])
    assert beside.count("<title>weight update") == 2
    assert f"<title>training on the step before, 0.00 to {middle:.2f} s" in beside
    assert "<title>generation, " in beside
    assert "step satisfied" not in beside
    assert "step satisfied" in alternating
    assert "weight update" not in alternating
    events = json.loads(write_chrome_trace(tmp_path).read_text())["traceEvents"]
    assert [event["name"] for event in events if (event["pid"], event["tid"]) == (1, 1)] == [
        "training on the step before",
        "weight update",
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 16))
def test_a_sample_waits_until_a_slot_is_free_for_any_delay_of_its_first_tokens(
    lengths: list[int], slots: int, interval: int
) -> None:
    """An engine of `slots` that draws a token a second, and hands out `interval` of them at once."""
    free, spans, started = [0] * slots, [], []
    for number, length in enumerate(lengths):
        slot = free.index(min(free))
        started.append(free[slot])
        free[slot] += length
        first = started[-1] + min(interval, length)
        spans.append(
            RequestInterval(
                f"{number}.0", number, 0.0, 0, float(first), interval, float(free[slot]), length, "finished"
            )
        )
    assert waits(spans, slots) == started
    spans.append(RequestInterval("late", 99, 0.0, 0, None, 0, 5.0, 0, "interrupted"))
    assert waits(spans, slots) == [*started, None], "it never sampled a token"


def test_a_sample_with_tokens_had_a_slot_before_for_any_order_of_slots() -> None:
    first, jumped = (
        RequestInterval("0.0", 0, 0.0, 0, 1.0, 1, 9.0, 9, "finished"),
        RequestInterval("1.0", 1, 0.0, 0, 2.0, 1, 4.0, 3, "finished"),
    )
    assert waits([first, jumped], 1) == [0.0, 2.0]
