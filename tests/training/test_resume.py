"""Runs that died, resumed as a user does it: offers, refusals, and kept state."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from april.commands.main import main
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.reporting.metrics_log import read_metrics
from april.rollout.batch import RolloutBatch
from april.rollout.generation.in_flight import InFlight
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.sample import Sample
from april.training import build, run_state
from april.training.checkpoint import FORMAT, checkpoints
from april.training.local import LocalLearner
from april.training.resume import check_unchanged
from april.training.run_directory import lock_directory
from april.training.stop import SIGNALS
from tests.crash_points import RECIPE, differences, outcome, prepare
from tests.limits import HANG

OFTEN = RECIPE.replace("save_interval = 2", "save_interval = 1").replace("keep_checkpoints = 1", "keep_checkpoints = 2")
SELDOM = RECIPE.replace("save_interval = 2", "save_interval = 0")
SCRIPT = """
import sys
from pathlib import Path
from typing import Any
from april.reporting.metrics_log import last_step
from tests.crash_points import Points, live

class InTheLastStep(Points):
    def reached(self):
        if last_step(self.directory) >= 3:
            super().reached()

base = Path(sys.argv[1])
print(live(base, base / "run", int(sys.argv[2]), Points.die, InTheLastStep).status)
"""


def die(base: Path, recipe: str, at: int) -> Path:
    """A run that was killed at a durable write, in its last step."""
    base.mkdir()
    prepare(base)
    (base / "recipe.toml").write_text(recipe)
    done = subprocess.run([sys.executable, "-c", SCRIPT, base, str(at)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(-signal.SIGKILL), done.stdout + done.stderr
    assert len(read_metrics(base / "run")) >= 4
    return base / "run"


@pytest.fixture(scope="module")
def saved_often(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of its last two whole steps, and a part of a step in the journal."""
    return die(tmp_path_factory.mktemp("resume") / "often", OFTEN, 75)


@pytest.fixture(scope="module")
def saved_seldom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No checkpoint: everything is in the journal."""
    return die(tmp_path_factory.mktemp("resume") / "seldom", SELDOM, 6)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    threads, handlers = torch.get_num_threads(), {number: signal.getsignal(number) for number in SIGNALS}
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def resume(run: Path, *flags: str) -> int:
    sys.argv = ["april", "train", "--resume", str(run), *flags]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def content(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"}


def flip(path: Path, position: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 255
    path.write_bytes(data)


def steps(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run)]


def test_a_run_that_died_before_its_first_checkpoint_resumes(saved_seldom: Path, tmp_path: Path) -> None:
    run = copy(saved_seldom, tmp_path)
    before = read_metrics(run)
    assert resume(run) == 0
    assert steps(run) == [0, 1, 2, 3, 4]
    after = read_metrics(run)
    for name in ("reward", "loss", "response_length_mean", "step_consumed_tokens", "rollout_seconds"):
        assert [line.get(name) for line in after[:4]] == [line.get(name) for line in before[:4]], name


def test_files_have_the_permissions_of_the_umask(saved_often: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for checkpoint in checkpoints(saved_often / "checkpoints"):
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}


def test_a_damaged_checkpoint_is_named_and_the_previous_one_offered(
    saved_often: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_often, tmp_path)
    former, newest = checkpoints(run / "checkpoints")
    flip(newest / "model.safetensors")
    before = content(run)
    assert resume(run) == 2
    said = capsys.readouterr().err
    assert f"{newest / 'model.safetensors'}: damaged" in said
    assert f"april resume {run} --salvage, which returns to {former.name}" in said
    assert content(run) == before, "nothing is overwritten"
    assert resume(run, "--salvage") == 0
    kept = run / "checkpoints" / f"{newest.name}.damaged-1"
    assert (kept / "model.safetensors").read_bytes() == before[str((newest / "model.safetensors").relative_to(run))]
    assert steps(run) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["april.json", "manifest.json", "training/state.safetensors", "config.json"])
def test_every_file_of_a_checkpoint_is_checked(
    saved_often: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_often, tmp_path)
    newest = checkpoints(run / "checkpoints")[-1]
    flip(newest / name, (newest / name).stat().st_size // 2)
    assert resume(run) == 2
    said = capsys.readouterr().err
    assert newest.name in said
    assert "--salvage" in said
    (newest / name).unlink()
    assert resume(run) == 2
    assert newest.name in capsys.readouterr().err


def test_a_damaged_journal_is_named_and_its_readable_part_is_offered(
    saved_seldom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_seldom, tmp_path)
    (segment,) = (run / "journal").glob("*.events")
    flip(segment, segment.stat().st_size // 2)
    before = content(run)
    assert resume(run) == 2
    said = capsys.readouterr().err
    assert f"{segment}: damaged before its end" in said
    assert "--salvage, which returns to the beginning" in said
    assert content(run) == before
    assert resume(run, "--salvage") == 0
    assert (run / "journal.1" / segment.name).read_bytes() == before[f"journal/{segment.name}"]
    assert steps(run) == [0, 1, 2, 3, 4]


def test_a_missing_journal_is_named(saved_often: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy(saved_often, tmp_path)
    shutil.rmtree(run / "journal")
    assert resume(run) == 2
    assert f"{run / 'journal'}: missing" in capsys.readouterr().err
    assert resume(run, "--salvage") == 0
    assert steps(run) == [0, 1, 2, 3, 4]


def test_settings_of_training_cannot_change_for_repeated_steps(
    saved_seldom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_seldom, tmp_path)
    assert resume(run, "--learning-rate", "1e-4") == 2
    said = capsys.readouterr().err
    assert "training.learning_rate: cannot change yet: 3 steps after the last checkpoint" in said
    assert resume(run, "--rewind", "--learning-rate", "1e-4") == 0
    assert (run / "journal.1").exists()
    assert json.loads((run / "summary.json").read_text())["recipe"]["training"]["learning_rate"] == 1e-4
    assert steps(run) == [0, 1, 2, 3, 4]


def test_settings_that_contradict_groups_in_flight_are_refused_before_any_write(
    saved_often: Path, saved_seldom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--rewind is named where it helps: if the restored state has no groups in flight."""
    other = ("--n-samples-per-prompt", "2")
    (tmp_path / "seldom").mkdir()
    run = copy(saved_seldom, tmp_path / "seldom")
    before = content(run)
    assert resume(run, *other) == 2
    error = capsys.readouterr().err
    assert "rollout.n_samples_per_prompt = 2: " in error
    assert "groups under way have 3 samples" in error
    assert f"or go back to the beginning, to which this does not apply: april resume {run} --rewind" in error
    assert content(run) == before
    assert resume(run, "--rewind", *other) == 0
    assert steps(run) == [0, 1, 2, 3, 4]
    run = copy(saved_often, tmp_path)
    before = content(run)
    for flags in (other, ("--rewind", *other)):
        assert resume(run, *flags) == 2
        error = capsys.readouterr().err
        assert "groups under way have 3 samples" in error
        assert "--rewind" not in error
    assert resume(run, "--max-staleness", "0", "--over-sampling-batch-size", "2") == 2
    assert "within max_staleness = 0 at rollout_batch_size = 2" in capsys.readouterr().err
    assert resume(run, "--rewind", "--seed", "5") == 2
    assert "task: the saved prompt order is of seed 0, but the settings say 5" in capsys.readouterr().err
    assert content(run) == before
    assert resume(run) == 0
    assert steps(run) == [0, 1, 2, 3, 4]


def test_steps_are_not_repeated_with_other_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april.training.resume.steps_to_redo", lambda run: 2)
    before, after = Recipe(), Recipe()
    check_unchanged(tmp_path, before, after)
    after.training.router_replay = "latest"
    with pytest.raises(ConfigError, match=r"training\.router_replay: cannot change yet: 2 steps"):
        check_unchanged(tmp_path, before, after)


def test_groups_under_way_end_at_their_stop_strings_and_keep_their_truncation(
    saved_often: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(saved_often, tmp_path)
    assert resume(run, "--rewind", "--top-p", "0.9") == 2
    assert "rollout.top_p, top_k and min_p: " in capsys.readouterr().err
    assert resume(run, "--steps", "5", "--stop", "never") == 0
    submit, watched = InFlight.submit, []

    def noted(self: InFlight, engine: Any, samples: Iterable[Sample], *rest: Any) -> None:
        samples = list(samples)
        submit(self, engine, samples, *rest)
        watched.extend(sample.id in engine._watched for sample in samples if sample.stop_strings)

    monkeypatch.setattr(InFlight, "submit", noted)
    assert resume(run, "--steps", "6", "--stop") == 0
    assert watched
    assert all(watched)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--algorithm", "ppo"), "these settings need critic, critic_optimizer, policy_optimizer, random"),
        (("--lora.rank", "2"), "these settings need adapters, policy_optimizer, random"),
    ],
)
def test_a_checkpoint_of_a_different_algorithm_is_refused_before_loading_a_model(
    flags: tuple[str, ...],
    problem: str,
    saved_often: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "load_policy", None)
    assert resume(copy(saved_often, tmp_path), "--rewind", *flags) != 0
    said = capsys.readouterr().err
    assert problem in said
    assert "resume with the model, and the algorithm, kl_coef and lora settings, that the run was begun with" in said


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_a_checkpoint_of_a_different_format_is_refused(
    saved_often: Path, tmp_path: Path, other: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_often, tmp_path)
    path = checkpoints(run / "checkpoints")[-1] / "april.json"
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {other}'))
    before = content(run)
    assert resume(run, "--salvage") == 2
    assert f"format {other}, but this version of april reads {FORMAT}" in capsys.readouterr().err
    assert content(run) == before


@pytest.mark.parametrize("repair", ["--salvage", "--rewind"])
def test_a_run_with_the_journal_of_an_earlier_april_is_refused(
    saved_often: Path, tmp_path: Path, repair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_often, tmp_path)
    shutil.rmtree(run / "checkpoints")  # checkpoints have a format number of their own
    shutil.rmtree(run / "journal")
    (run / "journal.sqlite").write_bytes(b"SQLite format 3")
    before = content(run)
    assert resume(run, repair) != 0
    assert "journal.sqlite: an earlier version of april wrote this run" in capsys.readouterr().err
    assert content(run) == before


def test_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume(tmp_path) == 2
    assert "no run to resume" in capsys.readouterr().err
    (tmp_path / "recipe.json").write_text("{")
    assert resume(tmp_path) == 2
    assert "recipe.json: cannot be read as a recipe" in capsys.readouterr().err


def test_a_finished_run_is_reported_and_left_unchanged(
    saved_often: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_often, tmp_path)
    assert resume(run) == 0
    assert "april: resuming from step-00000" in capsys.readouterr().err
    before = content(run)
    assert resume(run) == 0
    assert capsys.readouterr().out == (
        f"{run} has finished after 4 steps; to train further: april resume {run} --steps N\n"
    )
    assert content(run) == before


def test_two_runs_in_one_directory_are_refused(
    saved_often: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dead run has left its lock file, which does not count."""
    run = copy(saved_often, tmp_path)
    assert (run / "lock").exists()
    recipe = saved_often.parent / "recipe.toml"
    with lock_directory(run):
        assert resume(run) == 2
        said = capsys.readouterr().err
        assert f"another run is going on there (process {os.getpid()} on " in said
        sys.argv = ["april", "train", str(recipe), "--output", str(run), "--if-exists", "rename"]
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert "another run is going on" in capsys.readouterr().err
        assert not run.with_name("run.1").exists()


def test_jumps_of_the_wall_clock_have_no_effect(
    saved_often: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock goes back an hour, or forward a year, at every reading."""
    jumps = iter(range(10**9))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + (-3600 if next(jumps) % 2 else 3e7))
    run = copy(saved_often, tmp_path)
    assert resume(run) == 0
    assert steps(run) == [0, 1, 2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["seconds"] < 600


def test_ctrl_c_during_a_save_finishes_the_checkpoint(
    saved_often: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_often, tmp_path)
    save, train = run_state.save_checkpoint, LocalLearner.train

    def train_interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return train(*args)

    def save_interrupted(*args: object) -> Path:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return save(*args)

    monkeypatch.setattr(LocalLearner, "train", train_interrupted)
    monkeypatch.setattr(run_state, "save_checkpoint", save_interrupted)
    assert resume(run, "--steps", "9", "--save-interval", "0") == 130
    assert "Stopped. To resume" in capsys.readouterr().out
    assert checkpoints(run / "checkpoints")[-1].name == "step-000004"
    monkeypatch.undo()
    assert resume(run, "--steps", "5") == 0
    assert steps(run) == [0, 1, 2, 3, 4, 5]


def test_a_second_ctrl_c_aborts_at_once_and_loses_no_rollout(
    saved_often: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(saved_often, tmp_path)
    update = RolloutScheduler.update_weights

    async def interrupted(self: RolloutScheduler, weights: object = None, version: int | None = None) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while "default_int_handler" not in str(signal.getsignal(signal.SIGINT)):
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        await update(self, weights, version)

    monkeypatch.setattr(RolloutScheduler, "update_weights", interrupted)
    assert resume(run) == 130
    said = capsys.readouterr().err
    assert "given up before the run was saved" in said
    assert f"april resume {run}" in said
    monkeypatch.undo()
    assert resume(run) == 0
    assert steps(run) == [0, 1, 2, 3, 4]


def test_a_second_ctrl_c_aborts_the_training_step(
    saved_often: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that trains ends at its next micro-batch, and nothing of the step counts."""
    run = copy(saved_often, tmp_path)
    train, interrupt, given_up = LocalLearner.train, LocalLearner.interrupt, threading.Event()

    def train_interrupted(self: LocalLearner, step: RolloutBatch, number: int) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        while "default_int_handler" not in str(signal.getsignal(signal.SIGINT)):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        assert given_up.wait(HANG)
        return train(self, step, number)

    def interrupt_noted(self: LocalLearner) -> None:
        interrupt(self)
        given_up.set()

    monkeypatch.setattr(LocalLearner, "train", train_interrupted)
    monkeypatch.setattr(LocalLearner, "interrupt", interrupt_noted)
    assert resume(run) == 130
    assert "given up before the run was saved" in capsys.readouterr().err
    monkeypatch.undo()
    assert resume(run) == 0
    assert steps(run) == [0, 1, 2, 3, 4]


def test_the_comparison_of_crash_points_sees_a_difference(saved_often: Path, tmp_path: Path) -> None:
    """What `tests.crash_points` compares is not blind."""
    run = copy(saved_often, tmp_path)
    (tmp_path / "ledger").mkdir()
    assert resume(run) == 0
    found = outcome(tmp_path, run)
    assert differences(found, found) == []
    other = {**found, "metrics": [*found["metrics"][:-1], {**found["metrics"][-1], "reward": 0.123}]}
    assert differences(other, found)
    weights = {name: tensor + 0.01 for name, tensor in found["weights"].items()}
    assert differences({**found, "weights": weights}, found)
    assert differences({**found, "trained": {"4": []}}, found)
