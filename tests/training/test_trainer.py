"""`april train` as a user runs it: a real model, a real tokenizer, real problems, real signals."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from april.reporting.faults import read_faults
from april.reporting.metrics_log import read_metrics
from tests import forked, tiny
from tests.forked import run as april
from tests.forked import wait_until
from tests.limits import HANG

ROLLOUT = """
stop_token_ids = [20, 21, 22, 23]
reward_workers = 0
"""
TRAINING = """
learning_rate = 3e-3
eval_samples = 2
eval_interval = 3
save_interval = 3
"""
TIMES = ("seconds", "per_second", "occupancy", "idle_slots")
MEMORY = ("kv_cache_bytes", "resident_bytes")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny.recipe(tmp_path, rollout=ROLLOUT, algorithm="kl_coef = 0.0\n", training=TRAINING)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The run's metrics without those that measure this process: its time and its memory."""
    return [
        {name: value for name, value in line.items() if not any(word in name for word in TIMES + MEMORY)}
        for line in read_metrics(run)
    ]


def test_a_run_writes_all_documented_files(recipe: Path, tmp_path: Path) -> None:
    done = april("train", recipe)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    for name in ("evaluations", "eval_reward", "consumed_tokens_per_second", "rollout_seconds", "versions"):
        assert name in summary
    assert summary["steps"] == 6
    assert summary["discarded_tokens"] == 0
    assert summary["staleness_max"] <= 2
    assert summary["off_policy_token_share"] > 0, "the workload is meant to interrupt something"
    assert summary["generated_tokens"] == summary["consumed_tokens"] + summary["tokens_buffered"]
    assert summary["recipe"]["rollout"]["n_samples_per_prompt"] == 3
    assert [line["step"] for line in metrics(run)] == list(range(7))
    assert list(run.glob("tensorboard/events*"))
    assert "<svg" in (run / "report.html").read_text()
    checkpoint = run / "checkpoints" / "step-000006"
    policy = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.isfinite(policy(torch.tensor([[5, 6]])).logits).all()
    assert AutoTokenizer.from_pretrained(checkpoint).decode([5]) == "!"


@pytest.mark.parametrize(
    "flags",
    [
        ("--on-update", "recompute", "--algorithm", "ppo", "--kl-coef", "0.05", "--critic-learning-rate", "1e-3"),
        ("--on-update", "keep", "--algorithm", "rloo", "--correction", "tis", "--updates-per-step", "3"),
        ("--on-update", "redraft", "--lora.rank", "4", "--kl-coef", "0.05", "--learning-rate", "1e-2"),
    ],
    ids=["recompute ppo", "keep rloo", "redraft lora"],
)
def test_a_resumed_run_trains_on_the_same_groups(recipe: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Bit-equal metrics, on one thread, to the run that was never stopped."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert april("train", recipe, "--output", straight, *flags).returncode == 0
    first = april("train", recipe, "--output", stopped, *flags, "--steps", 3)
    assert first.returncode == 0, first.stderr
    second = april("train", "--resume", stopped, "--steps", 6)
    assert second.returncode == 0, second.stderr
    assert metrics(stopped) == metrics(straight)


@pytest.mark.parametrize("flags", [("--algorithm", "ppo", "--kl-coef", "0.05"), ("--lora.rank", "4")])
def test_a_run_on_shared_devices_that_is_resumed_equals_one_whose_trainer_stays_on_the_device(
    recipe: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Bit-equal metrics, on one thread: moves to host memory and back change nothing, before and after a resumption."""
    split, shared = tmp_path / "split", tmp_path / "shared"
    assert april("train", recipe, "--output", split, *flags).returncode == 0
    first = april("train", recipe, "--output", shared, *flags, "--layout", "shared", "--steps", 3)
    assert first.returncode == 0, first.stderr
    second = april("train", "--resume", shared, "--steps", 6)
    assert second.returncode == 0, second.stderr
    assert metrics(shared) == metrics(split)
    turns = [json.loads(line)["turn"] for line in (shared / "trace.jsonl").read_text().splitlines()]
    assert all({"engine asleep", "training", "engine serving"} <= {name for name, _, _ in turn} for turn in turns)
    assert len(turns) == 6
    assert "Engine and trainer take turns on the devices" in (shared / "report.html").read_text()


def test_ctrl_c_saves_the_run_and_prints_the_command_to_resume(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = forked.start("train", recipe, "--steps", 100000, "--eval-interval", 0)

    def steps_logged() -> int:
        return len(read_metrics(run)) if (run / "metrics.jsonl").exists() else 0

    wait_until(lambda: steps_logged() >= 3, process)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: list((run / "checkpoints").glob("step-*")), process)
    saved = steps_logged()
    wait_until(lambda: steps_logged() > saved, process)  # SIGUSR1 saves a run and does not end it
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 130, err
    assert f"april resume {run}" in out
    assert "Traceback" not in err
    assert (run / "report.html").exists()
    state = json.loads(max((run / "checkpoints").glob("*/april.json")).read_text())
    steps = state["log"]["steps"]
    assert steps >= 2
    assert state["rollout"]["state"]["buffer"]["groups"], "what was unfinished is in the checkpoint"

    resumed = april("train", "--resume", run, "--steps", steps + 2)
    assert resumed.returncode == 0, resumed.stderr
    assert f"april: resuming from step-{steps:06d}\n" in resumed.stderr
    assert [line["step"] for line in metrics(run)] == list(range(steps + 3))
    assert json.loads((run / "summary.json").read_text())["discarded_tokens"] == 0


def test_a_run_whose_output_is_closed_is_saved(recipe: Path, tmp_path: Path) -> None:
    process = forked.start("train", recipe, "--steps", 100000, "--eval-interval", 0)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=HANG) == 128 + signal.SIGPIPE, err
    assert err == f"april: Stopped. To resume: april resume {tmp_path / 'run'}\n"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_synchronous_runs_are_on_policy(recipe: Path, tmp_path: Path) -> None:
    assert april("train", recipe, "--no-partial-rollout", "--steps", 2).returncode == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["off_policy_token_share"] == summary["staleness_mean"] == 0
    assert summary["generated_tokens"] == summary["consumed_tokens"]


def test_the_users_own_records_and_reward_function(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"question": f"{a}+1=", "result": str(a + 1), "bonus": 0.25}) + "\n" for a in range(30))
    )
    (tmp_path / "my_reward.py").write_text(
        "def score(response, answer, bonus):\n    return bonus if answer in response else 0.0\n"
    )
    text = recipe.read_text()
    start, end = text.index("[task]"), text.index("[rollout]")
    task = (
        '[task]\nkind = "records"\npath = "data.jsonl"\nprompt_column = "question"\nanswer_column = "result"\n'
        'reward = "my_reward:score"\neval_size = 4\n'
    )
    recipe.write_text(text[:start] + task + text[end:].replace("reward_workers = 0", "reward_workers = 1"))
    done = april("train", recipe, "--steps", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(0 <= line["reward"] <= 0.25 for line in metrics(tmp_path / "run")[1:])


def test_a_failing_reward_function_names_the_prompt_and_keeps_the_run(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("def score(response, answer):\n    raise RuntimeError('no parser')\n")
    done = april("train", recipe, "--task.reward", "my_reward:score", "--eval-interval", 0, cwd=tmp_path)
    assert done.returncode == 1
    assert "no parser" in done.stderr
    assert "gcd" in done.stderr
    assert "Traceback" not in done.stderr


def test_survived_faults_are_in_the_log_the_metrics_and_the_report(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(
        "def score(response, answer):\n    if len(response) % 7 == 0:\n        raise RuntimeError('no <parser>')\n"
        "    return float(len(response) % 2)\n"
    )
    flags = ("--task.reward", "my_reward:score", "--on-reward-error", "reject", "--task.eval-size", 0)
    done = april("train", recipe, "--steps", 3, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    faults = [record for record in read_faults(run) if "quarantined" in record]  # not those that only warn
    counted = sum(line["groups_quarantined"] for line in metrics(run))
    assert counted == sum(len(record["quarantined"]) for record in faults) > 0
    assert faults[0]["quarantined"][0]["prompt"].startswith("gcd/train/")
    assert "no <parser>" in faults[0]["quarantined"][0]["error"]
    report = (run / "report.html").read_text()
    assert "quarantined (reward)" in report
    assert "no &lt;parser&gt;" in report


def test_a_run_is_never_overwritten(recipe: Path, tmp_path: Path) -> None:
    assert april("train", recipe, "--steps", 1).returncode == 0
    refused = april("train", recipe, "--steps", 1)
    assert refused.returncode == 2
    assert "there is a run already" in refused.stderr
    assert april("train", recipe, "--steps", 1, "--if-exists", "rename").returncode == 0
    assert (tmp_path / "run.1" / "summary.json").is_file()


def test_a_run_that_fails_before_its_first_step_does_not_occupy_its_directory(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("def score(response, answer):\n    raise RuntimeError('no parser')\n")
    failed = april("train", recipe, "--task.reward", "my_reward:score", "--steps", 1, cwd=tmp_path)
    assert failed.returncode == 1
    done = april("train", recipe, "--steps", 1)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "run.1" / "recipe.json").is_file(), "what was there is kept"
