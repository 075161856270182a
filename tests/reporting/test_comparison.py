from __future__ import annotations

import io

import pytest
from rich.console import Console

from april.reporting.comparison import ROWS, compare_runs, time_to_target


def record(arm: str, seed: int, **values: float | None) -> dict[str, object]:
    return {"arm": arm, "seed": seed, **dict.fromkeys(ROWS, 1.0), **values}


def test_arms_are_compared_seed_by_seed() -> None:
    rates = {"synchronous": (100.0, 200.0, 300.0), "partial": (150.0, 500.0, 330.0)}
    runs = [
        record(arm, seed, consumed_tokens_per_second=rate)
        for arm, values in rates.items()
        for seed, rate in enumerate(values)
    ]
    out = io.StringIO()
    result = compare_runs(runs, Console(file=out, width=200))
    partial = result["partial"]["consumed_tokens_per_second"]
    assert (partial["median"], partial["min"], partial["max"]) == (330, 150, 500)
    assert partial["ratio"] == {"median": 1.5, "min": 1.1, "max": 2.5, "runs": 3}
    assert "× 1.50 (1.10 to 2.50)" in out.getvalue()


def test_the_headline_is_the_time_to_the_target_if_all_runs_reached_it() -> None:
    faster = {"consumed_tokens_per_second": 1.55, "overall_tokens_per_second": 1.4, "time_to_target": 1.07}
    runs = [record("synchronous", 0), record("partial", 0, **faster)]
    out = io.StringIO()
    compare_runs(runs, Console(file=out, width=200))
    assert out.getvalue().endswith("Time to the target reward, relative to synchronous: partial × 1.07\n")
    runs += [record("synchronous", 1), record("partial", 1, **{**faster, "time_to_target": None})]
    compare_runs(runs, Console(file=out, width=200))
    assert out.getvalue().endswith("Overall tokens/s, relative to synchronous: partial × 1.40\n")


def test_a_target_that_no_run_reached_is_reported() -> None:
    runs = [record("a", 0, time_to_target=10.0), record("b", 0, time_to_target=None), record("a", 1), record("b", 1)]
    out = io.StringIO()
    result = compare_runs(runs, Console(file=out, width=200))
    assert result["b"]["time_to_target"]["runs"] == 1
    assert "1.0, 1 of 2 runs" in out.getvalue()


@pytest.mark.parametrize(
    ("rewards", "seconds"),
    [
        ((0.5, 0.7, 1.0), 15.0),
        ((0.5, 0.849, 0.9), 10.0 + 10.0 * 0.001 / 0.051),
        ((0.5, 0.85, 0.9), 10.0),
        ((0.9, 0.5, 0.9), 0.0),
        ((0.5, None, 0.9), 20.0),
        ((0.5, 0.9, 0.8), 8.75),
        ((0.5, None, 0.8), None),
    ],
)
def test_the_target_is_reached_between_two_evaluations(
    rewards: tuple[float | None, ...], seconds: float | None
) -> None:
    evaluations = [{"training_seconds": 10.0 * i, "eval_reward": reward} for i, reward in enumerate(rewards)]
    assert time_to_target(evaluations, 0.85) == (seconds if seconds is None else pytest.approx(seconds))
