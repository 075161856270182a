"""The second accuracy study: finished runs determine the next runs, and every arm is reported."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "accuracy"))

import comparison
import remedies
import remedies_analysis
from remedies import Run


def ended(run: Run, accuracy: float) -> dict[str, Any]:
    return {
        "key": run.key,
        **dataclasses.asdict(run),
        "evaluations": [[0, 0, 0, 0.0, 0.5], [3, 192, 0, 5.0, accuracy], [6, 384, 0, 10.0, accuracy]],
        "by_step": {name: [0.5] * 12 for name in remedies.LOGGED},
        "mean_staleness": 0.8,
        "cpu_seconds": 20.0,
        "rollout_seconds": 6.0,
        "train_seconds": 4.0,
    }


def study(accuracy: Callable[[Run], float], stages: set[str]) -> list[dict[str, Any]]:
    """The records of a study in which a run of a stage ends with `accuracy(run)`."""
    records: list[dict[str, Any]] = []
    while missing := [
        run
        for run in remedies.planned(records)
        if run.stage in stages and run.key not in {record["key"] for record in records}
    ]:
        records += [ended(run, accuracy(run)) for run in dict.fromkeys(missing)]
    return records


def test_the_lowest_of_equally_good_rates_is_the_best() -> None:
    ends = {1e-4: 0.75, 1.7e-4: 0.80, 3e-4: 0.805}
    records = study(lambda run: ends.get(run.rate, 0.6), {"select"})
    assert remedies.candidates("partial", records) == ([1e-4, 1.7e-4, 3e-4], 1.7e-4)


def test_rates_are_added_until_the_best_is_bracketed() -> None:
    falling = study(lambda run: 0.9 - 1000 * run.rate, {"select"})
    rates, best = remedies.candidates("synchronous", falling)
    assert (rates[0], best) == (2e-5, 2e-5), "the ladder ends there"
    rising = study(lambda run: 0.9 - 500 * abs(run.rate - 5e-4), {"select"})
    assert remedies.candidates("synchronous", rising) == ([1e-4, 1.7e-4, 3e-4, 5e-4, 9e-4], 5e-4)


def test_paired_runs_wait_for_the_rates_and_every_arm_has_its_settings(tmp_path: Path) -> None:
    assert {run.stage for run in remedies.planned([])} == {"select"}
    records = study(lambda run: 0.9 - abs(run.rate - 1.7e-4) * 1000, {"select"})
    runs = list(remedies.planned(records))
    assert {run.arm for run in runs} == set(remedies.ARMS)
    assert {run.rate for run in runs if run.stage == "high"} == {5.1e-4}
    assert len({run.key for run in runs if run.stage != "select"}) == 2 * 8 * len(remedies.ARMS)
    assert not any(run.repeatable for run in runs if run.arm in remedies.REMOVED)
    recipes = {r.arm: r.recipe(tmp_path / "run") for r in runs if r.stage in ("pair", "high") and r.repeatable}
    assert recipes.keys() == remedies.ARMS.keys() - set(remedies.REMOVED)
    assert not recipes["synchronous"].rollout_params().max_staleness
    assert recipes["ramp"].rollout_params().ramp_steps == 4
    assert recipes["window"].rollout_params().admission_window == 8
    assert recipes["opsm"].algorithm.correction == "opsm"


def test_every_arm_is_reported_with_missing_runs() -> None:
    def accuracy(run: Run) -> float:
        lift = {"synchronous": 0.02, "partial": 0.0}.get(run.arm, 0.01)
        return 0.9 - abs(run.rate - 1.7e-4) * 1000 + lift + 0.001 * (run.seed % 3)

    found = remedies_analysis.analyse(study(accuracy, {"select", "pair", "high"}))
    assert found["best"]["partial"]["minus_synchronous"]["difference"]["mean"] == pytest.approx(-0.02)
    ramp = found["high"]["ramp"]
    assert ramp["minus_partial"]["difference"] == pytest.approx({"mean": 0.01, "low": 0.01, "high": 0.01, "pairs": 8})
    assert ramp["minus_partial"]["p"] == 2 / 256
    assert ramp["corrected_p"] == pytest.approx(2 / 256 * 6, abs=1e-4)
    assert ramp["corrected_p"] < 0.05, "eight pairs are enough to show something"
    assert found["best"]["ramp"]["runs"] == 0
    page = remedies_analysis.page(found)
    assert "| ramp | 0.00017 | 0 | not run |" in page
    assert all(f"| {arm} | 0.00051 | 8 |" in page for arm in remedies.ARMS)


def test_a_sign_flip_test_is_exact_and_holm_lowers_no_p_value() -> None:
    assert comparison.sign_flip([1.0, -1.0]) == 1
    assert comparison.sign_flip([3.0, 2.0, 1.0]) == 0.25
    assert comparison.sign_flip([]) is None
    corrected = comparison.holm({"a": 0.03, "b": 0.02, "c": 0.9, "d": None})
    assert corrected == {"a": 0.06, "b": 0.06, "c": 0.9, "d": None}


def test_one_command_runs_all_stages_including_confirmation() -> None:
    def accuracy(run: Run) -> float:
        lift = {"ess": 0.02, "ramp": 0.015, "synchronous": 0.0}.get(run.arm, 0.001)
        return 0.9 - abs(run.rate - 1.7e-4) * 1000 + lift + 0.001 * (run.seed % 3)

    records = study(accuracy, {"select", "pair", "high", "best", "two", "own-rate", "confirm"})
    two = {(r["arm"], r["rate"]) for r in records if r["stage"] == "two"}
    assert two == {("ramp+ess", 5.1e-4), ("ramp+ess", 1.7e-4), ("synchronous", 3.6e-4)}, "0.51e-3 times the root of 0.5"
    confirm = [r for r in records if r["stage"] == "confirm"]
    assert {r["arm"] for r in confirm} == {"synchronous", "partial", "ess"}, (
        "the winner, the cheaper of two within 0.01"
    )
    assert {(r["task"], r["rate"]) for r in confirm} == {("factors", 1.7e-4), ("gcd", 1.7e-4), ("primes", 8.5e-5)}
    assert remedies.settings_of("ramp+ess") == {"rollout.ramp_steps": 4}
    found = remedies_analysis.analyse(records)
    assert found["high"]["ramp+ess"]["runs"] == 8
    (everything,) = [row for row in found["confirm"] if (row["arm"], row["task"]) == ("ess", "all")]
    assert everything["difference"]["pairs"] == 3 * 3 * 8
    assert everything["difference"]["mean"] == pytest.approx(0.02, abs=1e-3)
    page = remedies_analysis.page(found)
    assert "| ess | all | all | 72 |" in page
    assert "`synchronous` at 0.00036, the mean rate of `ess`" in page
