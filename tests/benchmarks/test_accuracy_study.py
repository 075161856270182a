"""The accuracy study on two cells that are small enough for a test: the real recipe, policy, problems and scorer."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "accuracy"))

import analysis
import study
from study import Cell

SYNCHRONOUS = Cell("main", "factors", "grpo", "behaviour", 1.0, 0, seed=1)
PARTIAL = dataclasses.replace(SYNCHRONOUS, over_sampling=2.0, max_staleness=5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Cell.recipe

    def recipe(cell: Cell, output: Path) -> Any:
        recipe = whole(cell, output)
        recipe.task = dataclasses.replace(recipe.task, eval_size=6)
        recipe.rollout.rollout_batch_size, recipe.rollout.n_samples_per_prompt = 2, 3
        recipe.rollout.over_sampling_batch_size = round(2 * cell.over_sampling)
        recipe.rollout.max_response_length = 24
        recipe.training.steps, recipe.training.eval_interval = 3, 1
        return recipe

    monkeypatch.setattr(Cell, "recipe", recipe)


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in record.items() if "seconds" not in name}
    return kept | {
        "evaluations": [[v for i, v in enumerate(e) if i != analysis.SECONDS] for e in record["evaluations"]]
    }


def test_a_resumed_study_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    stopped, whole = tmp_path / "stopped.jsonl", tmp_path / "whole.jsonl"
    assert study.run_cells([SYNCHRONOUS, PARTIAL], stopped, limit=1) == 1
    with stopped.open("a") as file:
        file.write('{"key": "main-factors-grpo-behaviour-2.0')  # killed in the middle of a line
    assert study.run_cells([SYNCHRONOUS, PARTIAL], stopped) == 1
    assert study.run_cells([SYNCHRONOUS, PARTIAL], stopped) == 0
    assert study.run_cells([PARTIAL, SYNCHRONOUS], whole) == 2

    records = {record["key"]: without_times(record) for record in study.recorded(stopped)}
    assert records == {record["key"]: without_times(record) for record in study.recorded(whole)}
    synchronous, partial = records[SYNCHRONOUS.key], records[PARTIAL.key]
    assert synchronous["off_policy_token_share"] == 0 < partial["off_policy_token_share"]
    assert [e[:2] for e in partial["evaluations"]] == [[0, 0], [1, 6], [2, 12], [3, 18]]
    assert partial["generated_tokens"] > partial["consumed_tokens"] > 0
    assert partial["generated_tokens"] != synchronous["generated_tokens"]


def test_a_cell_that_another_process_has_claimed_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    with study.claimed(PARTIAL, path) as free:
        assert free
        assert study.run_cells([PARTIAL], path) == 0
    assert not path.exists()


def test_a_training_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise study.TrainingError("the gradient's norm is nan")

    monkeypatch.setattr("april.training.local.LocalLearner.train", fail)
    record = study.run(PARTIAL)
    assert record["error"] == "the gradient's norm is nan"
    assert analysis.final_accuracy(record) == 0
    assert len(record["evaluations"]) == 1


def cell(cell: Cell, accuracies: list[float]) -> dict[str, Any]:
    evaluations = [[4 * i, 100 * i, 1000 * i, 10.0 * i, accuracy] for i, accuracy in enumerate(accuracies)]
    met = dict.fromkeys(study.DIAGNOSTICS, 0.0)
    return {
        **dataclasses.asdict(cell),
        "evaluations": evaluations,
        "diagnostics": met,
        "cpu_seconds": 30.0,
        "mean_staleness": 1.0,
        "off_policy_token_share": 0.5,
        "largest_weight": 1.0,
    }


def test_the_arms_are_compared_seed_by_seed() -> None:
    records = []
    for seed, (before, after) in enumerate([(0.6, 0.7), (0.8, 0.9), (0.7, 0.8)]):
        records.append(cell(dataclasses.replace(SYNCHRONOUS, seed=seed), [0.5, 0.5, before, before]))
        records.append(cell(dataclasses.replace(PARTIAL, seed=seed), [0.5, after, after, after]))
    records.append(cell(dataclasses.replace(PARTIAL, seed=7), [0.0, 0.0, 0.0, 0.0]))  # without its pair
    grid = analysis.main_grid(records)
    found = grid["all"]
    assert grid["targets"] == {"factors": 0.625}  # half way from 0.5 to the mean of 0.7 and 0.8
    assert found["accuracy_difference"] == pytest.approx({"mean": 0.1, "low": 0.1, "high": 0.1, "pairs": 3})
    assert found["reached_target"] == {"synchronous": 2, "partial": 3}
    # by a straight line, in hundreds of samples: 1 + 0.125 / 0.3 and 1 + 0.125 / 0.2 against 0.125 / (0.2, 0.4, 0.3)
    expected = (0.3125 / (1 + 0.125 / 0.3) * (0.125 / 0.3) / (1 + 0.125 / 0.2)) ** (1 / 2)
    assert found["ratios"]["samples_to_target"]["mean"] == pytest.approx(expected, abs=2e-3)


def test_a_correction_breaks_if_it_falls_below_the_synchronous_runs() -> None:
    base = Cell("main", "gcd", "grpo", "behaviour", 1.0, 0, seed=0)
    records = []
    for seed in range(3):
        records.append(cell(dataclasses.replace(base, seed=seed), [0.5, 0.8, 0.8]))
        for correction, accuracy in (("none", 0.6), ("tis", 0.79)):
            stale = dataclasses.replace(base, correction=correction, over_sampling=4.0, max_staleness=None, seed=seed)
            records.append(cell(stale, [0.5, accuracy, accuracy]))
    rows = {row["correction"]: row for row in analysis.staleness_grid(records)["rows"]}
    assert rows["none"]["breaks"]
    assert rows["none"]["difference"]["mean"] == pytest.approx(-0.2)
    assert not rows["tis"]["breaks"]


def test_a_bound_is_compared_with_none_at_the_same_over_sampling_and_seed() -> None:
    records = []
    for seed in range(3):
        for over_sampling, bound, end in (
            (2.0, None, 0.6),
            (2.0, 1, 0.7),
            (4.0, None, 0.3),
            (4.0, 5, 0.5),
            (3.0, 2, 0.9),
        ):
            run = Cell("staleness", "gcd", "grpo", "tis", over_sampling, bound, seed)
            records.append(cell(run, [0.5, end, end]))
    bounds = analysis.staleness_grid(records)["bounds"]
    assert bounds["tis"].keys() == {"1", "5"}, "there is no run without a bound beside the third"
    assert bounds["tis"]["1"]["mean"] == pytest.approx(0.1)
    assert bounds["all"]["5"]["mean"] == pytest.approx(0.2)
    assert bounds["none"]["1"]["pairs"] == 0


def test_kept_caches_and_longer_runs_are_compared_with_matching_runs() -> None:
    records = []
    for seed in range(3):
        for over_sampling, bound, end in ((1.0, 0, 0.8), (2.0, 5, 0.7)):
            main = Cell("main", "factors", "grpo", "behaviour", over_sampling, bound, seed)
            records.append(cell(main, [0.5, end, end]))
            records.append(cell(dataclasses.replace(main, grid="long"), [0.5, 0.6, end + 0.1, end + 0.1]))
        kept = Cell("keep", "factors", "grpo", "behaviour", 2.0, 5, seed)
        records.append(cell(kept, [0.5, 0.75, 0.75]))
        records.append(cell(dataclasses.replace(kept, task="gcd"), [0.0, 0.0, 0.0]))  # without its pair
    (longer,) = analysis.long_grid(records)
    assert longer["partial"]["mean"] == pytest.approx(0.8)
    assert longer["difference"]["mean"] == pytest.approx(-0.1)
    assert longer["difference_by_step"] == pytest.approx({0: 0.0, 4: 0.0, 8: -0.1, 12: -0.1})
    kept_rows = {row["task"]: row["difference"] for row in analysis.keep_grid(records)}
    assert kept_rows["factors"]["mean"] == kept_rows["all"]["mean"] == pytest.approx(0.05)
    assert kept_rows["gcd"]["pairs"] == 0
    assert analysis.main_grid(records)["all"]["accuracy_difference"]["mean"] == pytest.approx(-0.1)


def test_the_grid_contains_each_requested_cell_once() -> None:
    cells = study.all_cells()
    assert len({c.key for c in cells}) == len(cells)
    main = [c for c in cells if c.grid == "main" and c.seed < 5]
    assert len(main) == 3 * 3 * 2 * 5
    for c in cells:
        assert c.over_sampling <= (c.max_staleness if c.max_staleness is not None else 9) + 1
    assert json.loads(json.dumps([dataclasses.asdict(c) for c in cells]))


def test_the_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from plots import draw

    base = Cell("main", "gcd", "grpo", "behaviour", 1.0, 0, seed=0)
    records = [
        cell(SYNCHRONOUS, [0.5, 0.6, 0.7]),
        cell(PARTIAL, [0.5, 0.7, 0.8]),
        cell(base, [0.5, 0.6, 0.7]),
        cell(dataclasses.replace(base, correction="tis", over_sampling=2.0, max_staleness=1), [0.5, 0.6, 0.7]),
    ]
    draw(records, tmp_path)
    assert "synchronous" in (tmp_path / "learning.svg").read_text()
    assert (tmp_path / "staleness.svg").stat().st_size > 1000
