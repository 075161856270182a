"""One call a step, and every file, tracker and total agrees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from april import Group, Prompt, RolloutBatch, SamplingParams
from april.reporting.comparison import run_record
from april.reporting.metrics import METRICS, TABLE, condensed, failures_in, plotted, show
from april.reporting.metrics_log import read_metrics
from april.reporting.run_log import RunLog
from april.reporting.totals import Totals
from april.reporting.trace import read_trace
from april.reporting.trackers import check_trackers
from april.rollout.batch import Failure, Plan
from april.rollout.sampling import FinishReason


def rollout(number: int, tokens: int = 3, failures: int = 0) -> RolloutBatch:
    """A step of two groups of two samples each, `tokens` long, rewarded by their index."""
    groups = []
    for id in (2 * number, 2 * number + 1):
        group = Group.start(id, Prompt((1, 2), f"prompt {id}"), 2, SamplingParams(max_tokens=tokens), seed=0)
        for sample in group.samples:
            sample.extend(range(tokens), [-1.0] * tokens, version=number, finish=FinishReason.LENGTH)
            sample.reward = float(sample.index)
        groups.append(group)
    failed = [Failure("reward", f"{number}.0", f"prompt {number}", "no parser")] * failures
    return RolloutBatch(
        version=number, plan=Plan(2), groups=groups, seconds=2.0, sampled_tokens=4 * tokens, failures=failed
    )


def record_run(log: RunLog, first: int, last: int) -> dict[str, Any]:
    """Steps `first` to `last`, an evaluation after each second one."""
    for number in range(first, last + 1):
        log.step(rollout(number, 3 * number, failures=number % 2), {"loss": 1 / number, "train_seconds": 1.0}, slots=4)
        if number % 2 == 0:
            log.evaluation({"eval_reward": number / 10, "eval_seconds": 0.5})
    return log.summary()


def ticking() -> Any:
    ticks = iter(range(10**6))
    return lambda: float(next(ticks))


def test_a_step_reaches_every_file_and_tracker_by_one_call(tmp_path: Path) -> None:
    with RunLog(tmp_path, {"seed": 1}, ["tensorboard"], clock=ticking()) as log:
        record_run(log, 1, 4)
        summary = log.finish()
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [record["step"] for record in read_trace(tmp_path)] == [1, 2, 3, 4]
    assert [record["consumed_tokens"] for record in records] == [12, 36, 72, 120]
    assert records[1]["eval_reward"] == 0.2
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("reward/eval_reward")] == pytest.approx([0.2, 0.4])
    assert {"optimisation/loss", "tokens_by_age/0", "failures/reward_failures"} <= set(events.Tags()["scalars"])
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert (tmp_path / "report.html").exists()
    assert summary["consumed_tokens_per_second"] == 120 / 8
    assert summary["reward_failures"] == 2
    assert summary["rollout_seconds"] == 8
    assert summary["recipe"] == {"seed": 1}
    assert [(e["step"], e["training_seconds"], e["eval_reward"]) for e in summary["evaluations"]] == [
        (2, 6.0, 0.2),
        (4, 12.0, 0.4),
    ]


def test_overlapping_seconds_count_once(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}) as log:
        # No training overlaps the first step. The third update waited for an evaluation, which is no training.
        for number, resumed_at in enumerate((None, 0.75, 1.5), start=1):
            step = replace(rollout(number), interrupted_at=resumed_at, resumed_at=resumed_at)
            log.step(step, {"train_seconds": 1.0}, slots=4)
            log.evaluation({"eval_reward": 0.5})
        summary = log.finish()
    assert [found["training_seconds"] for found in summary["evaluations"]] == [3.0, 5.25, 7.25]
    assert summary["overlap_seconds"] == 1.75
    compared = run_record("overlap", 0, summary, slots=4, target=0.5)
    assert compared["time_to_target"] == 3.0
    assert compared["overall_tokens_per_second"] == 36 / 7.25


def test_a_resumed_log_has_the_totals_of_an_uninterrupted_log(tmp_path: Path) -> None:
    with RunLog(tmp_path / "straight", {}) as log:
        straight = record_run(log, 1, 6)
    with RunLog(tmp_path / "stopped", {}) as log:
        record_run(log, 1, 3)
        state = json.loads(json.dumps(log.state_dict()))
        record_run(log, 4, 5)  # lost: they are after the saved part
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunLog(tmp_path / "stopped", {})
    with RunLog(tmp_path / "stopped", {}, resume=True, state=state) as log:
        resumed = record_run(log, 4, 6)
    del straight["seconds"], resumed["seconds"]
    assert resumed == straight
    for directory in ("straight", "stopped"):
        totals = Totals.of(read_metrics(tmp_path / directory)).values()
        assert {**totals, "seconds": 0} == {
            **{name: straight[name] for name in totals if name != "seconds"},
            "seconds": 0,
        }


FOLDED = ("skipped_updates", "staleness_max", "lr", "engine_occupancy", "rollout_seconds", "mine")


@given(
    records=st.lists(
        st.fixed_dictionaries(
            {},
            optional={name: st.integers(0, 1000) for name in FOLDED},
        ),
        max_size=12,
    ),
    cut=st.integers(0, 12),
)
@settings(max_examples=40)
def test_totals_restored_from_any_step_are_exact(records: list[dict[str, int]], cut: int) -> None:
    resumed = Totals(json.loads(json.dumps(Totals.of(records[:cut]).state_dict())))
    for record in records[cut:]:
        resumed.add(record)
    assert resumed.values() == Totals.of(records).values()
    for name in ("skipped_updates", "staleness_max", "lr", "mine"):
        found = [record[name] for record in records if name in record]
        expected = {"sum": sum(found), "max": max(found, default=0), "last": found[-1] if found else 0}
        expected["mean"] = sum(found) / len(found) if found else 0
        assert (resumed.get(name) or 0) == expected[METRICS[name].over if name in METRICS else "mean"]


def test_every_metric_of_the_table_is_named_once_and_can_be_shown() -> None:
    assert len(METRICS) == len(TABLE)
    labels = [m.label for m in TABLE]
    assert len(set(labels)) == len(labels)
    assert all(m.weight is None or m.weight in METRICS for m in TABLE)
    assert show("reward", -0.0001) == "0.000"
    assert show("reward", None) == "–"


def test_an_unknown_metric_is_handled_like_a_known_one() -> None:
    assert plotted({"step": 1, "reward": 1, "by_age/age_0": 2, "mine": 3, "ages": [4]}) == {
        "reward/reward": 1,
        "by_age/age_0": 2,
        "rollout/mine": 3,
        "ages/0": 4,
    }
    assert condensed("mine", [1, None, 2]) == 1.5
    assert condensed("staleness_max", [1, 3, 2]) == 3
    assert condensed("tokens_by_age", [[1], [1, 2]]) == [2, 2]
    assert condensed("admission_reason", ["a", None, "b"]) == "b"
    assert failures_in({"reward_failures": 204.0, "skipped_updates": 0}) == {"reward errors": 204}


def test_an_unknown_or_missing_tracker_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])
    with pytest.raises(ModuleNotFoundError, match=r"\[wandb\]"):
        RunLog(tmp_path, {}, trackers=["wandb"])
