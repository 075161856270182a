"""`april simulate`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from april.simulation.cost_model import CostModel
from tests import forked

RECIPE = """
[model]
path = "Qwen/Qwen3-8B"
[task]
kind = "reasoning_gym"
name = "gcd"
[rollout]
rollout_batch_size = 4
n_samples_per_prompt = 2
max_response_length = 2000
max_staleness = 2
[engine]
max_num_seqs = 4
"""


def april(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "recipe.toml").write_text(RECIPE)
    return forked.run("simulate", "recipe.toml", *arguments, cwd=folder, env={**os.environ, "COLUMNS": "100"})


def test_a_simulation_recommends_a_setting_and_writes_its_assumptions(tmp_path: Path) -> None:
    done = april(tmp_path, "--gpus", "2", "--steps", "12", "--warm-up", "4", "--price", "3.5", "--hardware", "mi300x")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "runs/simulation/simulation.json").read_text())
    synchronous, *partial = document["settings"]
    assert [point["over_sampling_batch_size"] for point in partial[:-1]] == [4, 5, 6, 8, 10, 12]
    assert partial[-1]["automatic"]
    assert partial[-1]["max_staleness"] <= 2
    assert all(point["max_staleness"] <= 2 for point in partial)
    assert synchronous["max_staleness"] == 0
    assert partial[3]["consumed_tokens_per_second"] > synchronous["consumed_tokens_per_second"]
    chosen = document["recommended"]
    hours = chosen["step_seconds"] / 3600
    tokens = chosen["consumed_tokens_per_second"] * chosen["rollout_seconds"]
    assert chosen["cost_per_million_tokens"] == pytest.approx(2 * 3.5 * hours / tokens * 1e6, rel=1e-6)
    assert f"recommended: {chosen['name']}" in done.stdout
    assert "half have 2,0" in " ".join(done.stdout.split()), "the workload's quantiles, cut off at 2,000 tokens"
    page = (tmp_path / "runs/simulation/simulation.html").read_text()
    assert "Throughput against staleness" in page
    assert "qwen3-8b on mi300x" in page


def test_a_simulation_follows_the_policy_of_the_recipe(tmp_path: Path) -> None:
    def partial(*flags: str) -> list[dict[str, float]]:
        done = april(
            tmp_path,
            "--gpus",
            "2",
            "--hardware",
            "h200",
            "--steps",
            "16",
            "--warm-up",
            "4",
            "--",
            "--max-staleness",
            "1",
            *flags,
        )
        assert done.returncode == 0, done.stderr
        document = json.loads((tmp_path / "runs/simulation/simulation.json").read_text())
        return document["settings"][1:]

    bounded, paper = partial(), partial("--policy", "april-paper")
    assert [point["over_sampling_batch_size"] for point in bounded[:-1]] == [4, 5, 6, 8]
    assert [point["automatic"] for point in bounded] == [False] * 4 + [True]
    assert 4 <= bounded[-1]["over_sampling_batch_size"] <= 8
    assert max(point["max_staleness"] for point in bounded) <= 1
    assert [point["over_sampling_batch_size"] for point in paper] == [4, 5, 6, 8, 10, 12, 16, 24], "it has no bound"
    assert max(point["max_staleness"] for point in paper) > 1


def test_gpus_that_only_train_leave_the_engines_fewer_gpus_and_more_kv_cache(tmp_path: Path) -> None:
    def document(*arguments: str) -> dict[str, Any]:
        done = april(tmp_path, "--gpus", "4", "--steps", "6", "--warm-up", "2", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "runs/simulation/simulation.json").read_text())

    colocated, separate = document(), document("--training-gpus", "2")
    assert separate["cost_model"]["kv_tokens"] > colocated["cost_model"]["kv_tokens"]
    assert "on 2 GPUs of its own" in separate["assumptions"]
    baseline, *others = separate["settings"]
    assert baseline == {**colocated["settings"][0], "name": "synchronous, all GPUs"}
    one, two = colocated["settings"][0], others[0]

    def training(point: dict[str, float]) -> float:
        tokens = point["consumed_tokens_per_second"] * point["rollout_seconds"]
        return (point["step_seconds"] - point["rollout_seconds"]) / tokens

    assert training(two) == pytest.approx(2 * training(one)), "half the GPUs train"
    assert two["rollout_seconds"] > one["rollout_seconds"], "and half of them generate"


def test_a_recipe_that_overlaps_is_simulated_both_ways_on_the_best_split_of_the_gpus(tmp_path: Path) -> None:
    flags = ("--gpus", "4", "--steps", "8", "--warm-up", "2", "--engine", "vllm", "--overlap", "True")
    done = april(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "runs/simulation/simulation.json").read_text())
    tried = {split["training_gpus"]: split["tokens_per_second"] for split in document["splits"]}
    assert max(tried, key=lambda split: tried[split]) == document["training_gpus"]
    assert set(tried) == {2, 3}, "one H100 does not hold the trainer of Qwen3-8B"
    points = {point["name"]: point for point in document["settings"]}
    assert points["synchronous"]["max_staleness"] == 0
    beside = {name: point for name, point in points.items() if point["overlapping"]}
    assert next(iter(points)) == "synchronous, all GPUs"
    in_turns = [name for name in points if name not in beside and not name.startswith("synchronous")]
    assert list(beside) == [f"{name}, overlap" for name in in_turns]
    for name, point in beside.items():
        assert point["max_staleness"] <= 2
        alternating = points[name.removesuffix(", overlap")]
        if not point["automatic"]:
            assert point["overall_tokens_per_second"] > alternating["overall_tokens_per_second"]
    assert "overall/s" in done.stdout
    assert "GPUs that train" in " ".join(done.stdout.split())

    in_turn = april(tmp_path, *flags, "--training-gpus", "0")
    assert "overlap" not in in_turn.stdout.replace("Nothing overlaps", "")
    assert "Nothing overlaps: training has no time, or no devices of its own." in " ".join(in_turn.stdout.split())


def test_a_measured_engine_and_recorded_lengths_imply_no_gpus(tmp_path: Path) -> None:
    CostModel(slots=4, kv_tokens=10_000, decode_batches=(1, 4), decode_seconds=(0.01, 0.012)).save(tmp_path / "c.json")
    run = tmp_path / "run"
    run.mkdir()
    rollout = {"n_samples_per_prompt": 2, "max_response_length": 2000, "rollout_batch_size": 4}
    (run / "recipe.json").write_text(json.dumps({"rollout": rollout}))
    (run / "summary.json").write_text(json.dumps({"train_seconds": 3.0, "consumed_tokens": 6_000_000}))
    steps = [{"step": i, "lengths": [10, 12, 900, 1000, 30, 40, 20, 22], "truncated": [False] * 8} for i in range(20)]
    (run / "trace.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    done = april(tmp_path, "--cost-model", "c.json", "--lengths-from", "run", "--steps", "12", "--warm-up", "4")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "runs/simulation/simulation.html").read_text()
    for text in (done.stdout, page):
        assert "1 engine as in c.json" in text
        assert "lengths of run" in text
        assert not {"h100", "GPU", "GPUs", "cost"} & set(text.split())
    assert "Training takes 0.5 s for a million tokens, as it did in run." in " ".join(done.stdout.split())
    document = json.loads((tmp_path / "runs/simulation/simulation.json").read_text())
    assert document["recommended"]["cost_per_million_tokens"] is None
    assert "cut off" not in document["hint"]
    assert "Slots limit you" in document["hint"], "four slots are full beside a KV cache that is not"

    short = april(tmp_path, "--cost-model", "c.json", "--max-response-length", "64", "--steps", "4", "--warm-up", "1")
    assert "of the responses reach max_response_length = 64 and are cut off there" in " ".join(short.stdout.split())
    assert "Training is left out" in short.stdout


SMALL = CostModel(slots=4, kv_tokens=10_000, decode_batches=(1, 4), decode_seconds=(0.01, 0.012))


def test_turns_and_the_time_of_environments_are_flags(tmp_path: Path) -> None:
    """A turn of 100 tokens takes about a second; an answer takes ten, in which slots are empty without partial
    rollouts."""
    SMALL.save(tmp_path / "c.json")
    measured = ("--cost-model", "c.json", "--steps", "4", "--warm-up", "1", "--max-staleness", "0")
    turns = ("--turn-tokens", "100", "--observation-tokens", "20", "--environment-seconds", "10")

    def document(*arguments: str) -> dict[str, Any]:
        done = april(tmp_path, *measured, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "runs/simulation/simulation.json").read_text())

    whole, cut = document(), document(*turns, "--environment-sigma", "1")
    assert "Episodes" not in whole["assumptions"]
    assert "turns of 100 tokens on average, answered with 20 tokens in 10 s on average (sigma 1)" in cut["assumptions"]
    synchronous = [document["settings"][0] for document in (whole, cut)]
    assert synchronous[1]["occupancy"] < 0.5 * synchronous[0]["occupancy"]


def test_recorded_turns_are_simulated_unless_flags_override_them(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "c.json")
    run = tmp_path / "run"
    run.mkdir()
    rollout = {"n_samples_per_prompt": 2, "max_response_length": 2000, "rollout_batch_size": 4}
    (run / "recipe.json").write_text(json.dumps({"rollout": rollout}))
    steps = [{"step": i, "lengths": [100, 300, 200, 200, 400, 0, 100, 300], "truncated": [False] * 8} for i in (1, 2)]
    (run / "trace.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    told = {"groups_consumed": 4, "step_consumed_tokens": 1600, "step_environment_tokens": 320}
    episodes = [
        {"step": 1, "turns_mean": 3.0, "environment_seconds": 6.0, **told},
        {"step": 2, "turns_mean": 5.0, "environment_seconds": 2.0, **told},
        {"step": 2, "accuracy": 0.5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))

    def assumed(*arguments: str) -> str:
        measured = ("--cost-model", "c.json", "--steps", "2", "--warm-up", "0", "--max-staleness", "0")
        done = april(tmp_path, *measured, "--lengths-from", "run", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "runs/simulation/simulation.json").read_text())["assumptions"]

    # 3,200 tokens, 640 of environments and 64 seconds in 16 samples of 4 turns on average.
    assert "turns of 50 tokens on average, answered with 10 tokens in 1 s on average (sigma 0)" in assumed()
    assert "turns of 80 tokens on average, answered with 0 tokens in 2 s" in assumed(
        "--turn-tokens", "80", "--environment-seconds", "2"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "lite"), "--workload lite: there are light, lognormal"),
        (("--gpus", "0"), "--gpus 0: must be positive"),
        (("--model.path", "someone/some-model"), "shape of this model is not known: name a directory"),
        (("--workload", "light", "--lengths-from", "run"), "--workload and --lengths-from: choose one"),
        (("--lengths-from", "nowhere"), "nowhere: no recipe.json of a run in this directory"),
        (("--cost-model", "c.json", "--price", "2"), "are those of GPUs: name them by --hardware"),
        (("--gpus", "1"), "131 GB for its part of the trainer's state and does not fit a h100"),
        (("--gpus", "1", "--engine", "vllm", "--overlap", "True"), "overlap takes a GPU for engines and one for"),
        (("--gpus", "4", "--training-gpus", "4"), "--training-gpus 4: must leave at least one of --gpus 4"),
        (
            ("--engine", "vllm", "--server-args=-sc"),
            "server_args names -sc: how many drafted tokens are accepted",
        ),
        (("--on-update", "redraft", "--over-sampling-batch-size", "8"), '"redraft" is not simulated'),
        (("--warm-up", "40"), "--warm-up 40"),
        (("--environment-seconds", "2"), "--turn-tokens: set the length of a turn"),
        (("--turn-tokens", "0.5"), "--turn-tokens and what goes with it"),
        (("--turn-tokens", "9", "--environment-sigma", "-1"), "no value may be negative"),
        (("--price", "nan"), "--price nan: must be positive"),
        (("--output", "recipe.toml/here"), "--output: nothing can be written to recipe.toml/here"),
        (("--cost-model", "none.json"), "none.json: cannot read this cost model"),
        (("--", "--over-sampling-batch-size", "99"), "over_sampling_batch_size = 99"),
        (("--over-sampling-batch-size", "99"), "over_sampling_batch_size = 99"),
    ],
)
def test_invalid_options_are_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = april(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
