"""The sentences at the top of a report."""

from __future__ import annotations

import json
from pathlib import Path

from april.reporting.report import outcome
from april.reporting.run import Run


def run_of(directory: Path, *records: dict[str, float]) -> Run:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Run.read(directory)


def test_the_outcome_states_steps_time_reward_engine_and_faults(tmp_path: Path) -> None:
    step = {"seconds": 60.0, "rollout_seconds": 30.0, "train_seconds": 30.0, "step_consumed_tokens": 3000.0}
    found = outcome(
        run_of(
            tmp_path,
            {"step": 0, "eval_reward": 0.25},
            {"step": 1, **step, "engine_occupancy": 0.5, "staleness_mean": 1.5, "groups_quarantined": 2},
            {"step": 2, **step, "engine_occupancy": 0.5, "staleness_mean": 1.5, "eval_reward": 0.75},
        )
    )
    assert found.startswith("2 training steps took 1:00, ")
    assert "the held-out reward rose from 0.250 to 0.750." in found
    assert "at a mean staleness of 1.50 weight updates." in found
    assert found.endswith("2 faults occurred.")


def test_a_run_without_steps_or_evaluations_states_only_available_figures(tmp_path: Path) -> None:
    assert outcome(run_of(tmp_path, {"step": 0, "eval_reward": 0.25})) == ""
    found = outcome(run_of(tmp_path, {"step": 1, "seconds": 5.0}))
    assert found == "1 training step took 0:05. No faults occurred."
