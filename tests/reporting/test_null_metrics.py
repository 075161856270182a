"""A metric that is not finite is null in the record; whatever reads the record takes null for not measured."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from april.reporting.alarms import Alarms
from april.reporting.comparison import compare_runs, run_record
from april.reporting.metrics import METRICS, condensed, plotted
from april.reporting.metrics_log import read_metrics
from april.reporting.progress import Progress
from april.reporting.report import write_report
from april.reporting.run import condense
from april.reporting.run_log import RunLog, closing_lines
from april.reporting.step_log import LARGEST
from april.reporting.totals import Totals
from tests.reporting.test_run_log import rollout

KEPT = {"step", "seconds"}
"""Metrics that are finite always."""
Changed = Callable[[int, str, Any], Any]


def each_in_turn(index: int, name: str, value: Any) -> Any:
    """Every metric is null in some step."""
    return None if index % 7 == sum(map(ord, name)) % 7 else value


def all_of_them(index: int, name: str, value: Any) -> Any:
    return None


def enormous(index: int, name: str, value: Any) -> Any:
    """The largest numbers that a record holds, of both signs."""
    return value if isinstance(value, list) else (-1) ** index * LARGEST


CHANGES = pytest.mark.parametrize("change", [each_in_turn, all_of_them, enormous])


def changed(metrics: list[dict[str, Any]], change: Changed) -> list[dict[str, Any]]:
    names = {*METRICS, "reward/mine", "mine"}
    full = [{**dict.fromkeys(names, 0.5), "tokens_by_age": [3, 4], **record} for record in metrics]
    return [
        {name: value if name in KEPT else change(index, name, value) for name, value in record.items()}
        for index, record in enumerate(full)
    ]


@CHANGES
def test_the_report_and_the_display_show_a_null_metric(
    change: Changed, simulated: Any, write: Any, tmp_path: Path
) -> None:
    metrics, traces, summary = simulated()
    records = changed(metrics, change)
    page = write_report(write(tmp_path / "run", records, traces, summary)).read_text()
    assert "NaN" not in page
    assert "nan<" not in page
    alarms, totals = Alarms(), Totals()
    with Progress(len(records), io.StringIO()) as progress:
        for record in records:
            alarms.observe(record)
            totals.add(record)
            plotted(record)
            progress.step(record)
            progress.evaluation(record)
            Console(file=io.StringIO(), width=120).print(progress.render())
    json.dumps(totals.state_dict())
    condense(records, 5)
    assert condensed("reward", [None, None]) is None


@CHANGES
def test_runs_with_null_metrics_are_compared(change: Changed, simulated: Any) -> None:
    metrics, _, _ = simulated()
    records = changed(metrics, change)
    summary: dict[str, Any] = {"evaluations": [], "versions": {}, **Totals.of(records).values()}
    for record in records:
        summary["evaluations"].append(
            {"step": record["step"], "training_seconds": 1.0, "eval_reward": record["reward"]}
        )
    runs = [run_record(arm, seed, summary, 8, 0.5) for arm in ("a", "b") for seed in (0, 1)]
    compare_runs(runs, Console(file=io.StringIO()))
    closing_lines({"steps": 1, "seconds": 1.0, **summary})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_run_records_a_null_metric(value: Any, tmp_path: Path) -> None:
    """Whatever training measured, and a reward so large that the sum of several is no float."""
    measured: Mapping[str, Any] = {name: value for name in METRICS if METRICS[name].section == "optimisation"}
    with RunLog(tmp_path, {}, trackers=["tensorboard"]) as log:
        for number in range(4):
            step = rollout(number)
            for sample in (sample for group in step.groups for sample in group.samples):
                sample.reward = 1.7e308
            log.step(step, {**measured, "train_seconds": 1.0}, slots=4)
            log.evaluation({"eval_reward": value, "accuracy": value})
        log.finish()
    for record in read_metrics(tmp_path):
        assert all(record[name] is None for name in measured)
        assert record["eval_reward"] is None
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)


def test_a_record_that_holds_nan_is_read_as_null(tmp_path: Path) -> None:
    """Written by another program, or by an april that did not know better."""
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"loss":NaN,"grad_norm":Infinity}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None}]
