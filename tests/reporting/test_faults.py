"""What went wrong in a run can be read in its log and its report."""

from __future__ import annotations

from pathlib import Path

from april import RolloutBatch
from april.reporting.faults import LONGEST, MOST, FaultLog, faults_of, read_faults
from april.reporting.report import write_report
from april.rollout.batch import Failure, Plan, Quarantine
from april.rollout.buffer import Rejection
from tests.reporting.conftest import simulate, write_run


def faulty(failures: int = 3, quarantined: int = 1, error: str = "no parser") -> RolloutBatch:
    return RolloutBatch(
        0,
        Plan(1),
        failures=[
            Failure("engine", f"{i}.0", f"prompt {i}", error if i else "boom " * LONGEST) for i in range(failures)
        ],
        quarantined=[Quarantine(i, f"prompt {i}", Rejection.ENGINE, error) for i in range(quarantined)],
    )


def test_a_step_without_faults_leaves_no_line(tmp_path: Path) -> None:
    with FaultLog(tmp_path) as log:
        log.write_step(1, RolloutBatch(0, Plan(1)), {"skipped_updates": 0.0, "out_of_memory": 0})
        log.write_step(2, faulty(), {"skipped_updates": 1.0, "out_of_memory": 2})
    (record,) = read_faults(tmp_path)
    assert record["step"] == 2
    assert [(f["kind"], f["times"], f["prompt"]) for f in record["failures"]] == [
        ("engine", 2, "prompt 2"),
        ("engine", 1, "prompt 0"),
    ]
    assert record["quarantined"] == [{"group": 0, "prompt": "prompt 0", "reason": "engine", "error": "no parser"}]
    assert (record["skipped_updates"], record["out_of_memory"]) == (1, 2)


def test_a_line_is_bounded_and_counts_omitted_faults() -> None:
    step = RolloutBatch(
        0,
        Plan(1),
        failures=[Failure("reward", f"{i}.0", "p", f"error {i} " + "x" * 10_000) for i in range(1000)],
        quarantined=[Quarantine(i, "p", Rejection.REWARD, "y" * 10_000) for i in range(1000)],
    )
    record = faults_of(step, {})
    assert len(str(record)) < 3 * MOST * LONGEST
    assert record["more_failures"] == record["more_quarantined"] == 1000 - MOST


def test_the_report_shows_faults_as_text(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=2)
    directory = write_run(tmp_path, metrics, traces, summary)
    assert "<h2>Faults</h2>" not in write_report(directory).read_text()
    with FaultLog(directory) as log:
        log.write_step(1, faulty(error="<script>alert(1)</script>"), {"skipped_updates": 1.0})
    page = write_report(directory).read_text()
    assert "<h2>Faults</h2>" in page
    assert "group 0 quarantined (engine)" in page
    assert "1 × update skipped" in page
    assert "<script>alert" not in page
