from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from april.reporting.alarms import FORECAST_STEPS, LEAST_ESS, MOST_KL, STEPS, Alarms
from april.reporting.faults import described, read_faults
from april.reporting.run_log import RunLog
from tests.reporting.test_run_log import rollout

STUDY = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "remedies.jsonl"
UNSTABLE = {"ess": LEAST_ESS - 0.1, "kl_behaviour": 2 * MOST_KL}
STABLE = {"ess": 1.0, "kl_behaviour": 0.0}


def warned(steps: list[dict[str, Any]]) -> list[int]:
    """The steps with a message, counted from 1."""
    alarms = Alarms()
    return [number for number, record in enumerate(steps, 1) if alarms.observe(record)]


def test_an_alarm_is_raised_once_while_its_condition_holds() -> None:
    assert warned([UNSTABLE] * 10) == [3]
    assert warned([UNSTABLE] * 5 + [STABLE] * 3 + [UNSTABLE] * 3) == [3, 10]
    assert warned([UNSTABLE] * 2) == []


@pytest.mark.parametrize(
    "only",
    [
        {"ess": 0.1, "kl_behaviour": 0.0},
        {"ess": 1.0, "kl_behaviour": 1.0},
        {"ess": 0.1},
        {"ess": 0.1, "kl_behaviour": None},
        {},
    ],
)
def test_drift_needs_both_signs(only: dict[str, Any]) -> None:
    assert warned([only] * 9) == []


def test_a_non_finite_gradient_norm_is_null_and_ends_no_run() -> None:
    assert warned([{**UNSTABLE, "grad_norm": None}] * 4) == [3]


def test_the_thresholds_separate_the_learning_rates_of_the_study() -> None:
    """At three times the best learning rate every run with partial rollouts raises the alarm, at the best rate none."""
    runs = [json.loads(line) for line in STUDY.read_text().splitlines()]

    def share(rate: float) -> float:
        logs = [run["by_step"] for run in runs if (run["arm"], run["rate"]) == ("partial", rate)]
        names = ("ess", "kl_behaviour")
        found = [
            warned([dict(zip(names, v, strict=True)) for v in zip(*map(log.get, names), strict=True)]) for log in logs
        ]
        assert len(found) >= 8
        return sum(map(bool, found)) / len(found)

    assert share(1.7e-4) == 0
    assert share(5.1e-4) == 1


def test_equal_rewards_in_every_group_raise_an_alarm_after_three_steps() -> None:
    flat = {"frac_reward_zero_std": 1.0, "reward": 0.25, "reward_std": 0.0, "grad_norm": 0.0}
    alarms = Alarms()
    (message,) = [message for _ in range(STEPS) for message in alarms.observe(flat)]
    assert "nothing is learned" in message
    assert "0.250" in message
    assert warned([flat] * 8) == [3]
    assert warned([flat, flat, {**flat, "frac_reward_zero_std": 0.9}] * 3) == []


def test_groups_without_variance_but_with_a_gradient_raise_no_alarm() -> None:
    """PPO's and REINFORCE++'s baselines are not the group's mean."""
    assert warned([{"frac_reward_zero_std": 1.0, "reward_std": 0.4, "grad_norm": 0.2}] * 5) == []


def test_environments_that_fail_in_every_episode_raise_an_alarm() -> None:
    assert warned([{"episodes_failed_share": 1.0}] * 4) == [3]
    assert warned([{"episodes_failed_share": 0.6}] * 4) == []


@pytest.mark.parametrize(("expected", "steps"), [(7600.0, [FORECAST_STEPS]), (2700.0, [FORECAST_STEPS]), (5000.0, [])])
def test_throughput_far_from_its_forecast_raises_an_alarm(expected: float, steps: list[int]) -> None:
    """4,144 tokens/s are measured; a step that took no time, from surplus groups alone, counts with its tokens."""
    usual = {"expected_consumed_tokens_per_second": expected, "step_consumed_tokens": 8000, "rollout_seconds": 2.0}
    surplus = {**usual, "step_consumed_tokens": 9148, "rollout_seconds": 1e-5}
    slow = {**usual, "step_consumed_tokens": 9148, "rollout_seconds": 4.0}
    assert warned([usual, usual, surplus, slow, usual, usual, usual, usual]) == steps


def test_the_run_log_keeps_the_warning(tmp_path: Path) -> None:
    shown: list[str] = []

    class Noted:
        note = staticmethod(shown.append)

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    with RunLog(tmp_path, {}, progress=Noted()) as log:  # type: ignore[arg-type]
        for number in (1, 2, 3):
            log.step(rollout(number), {"ess": 0.5, "kl_behaviour": 0.01, "grad_norm": 2.0}, slots=4)
    (record,) = read_faults(tmp_path)
    assert record["step"] == 3
    lines = [why for what, why in described(record) if what == "warning"]
    assert any("effective sample size is 0.50" in why for why in lines)
    assert shown == [f"warning: {why}" for why in lines]
