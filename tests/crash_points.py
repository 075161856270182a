"""Kill a tiny run at every durable write, resume it, and compare the end with a run that never died.

    python -m tests.crash_points                    # every point in every mode
    python -m tests.crash_points --stride 20 --modes kill power
    python -m tests.crash_points --kind episodes    # the same with an environment
    python -m tests.crash_points --kind mixture     # a mixture of experts with router replay
    python -m tests.crash_points --kind images      # prompts with images

A process that has imported everything forks one child a life, so that a crash is a real one and costs half a second. A
point lies before and after each commit of the journal, each fsync, rename and removal, each line of a log and each
file of a checkpoint. The modes:

- kill: SIGKILL at the point;
- power: the same, and data that was not synced is lost: files shrink to their size at the last fsync, the journal is
  torn anywhere in its last commit;
- twice: SIGKILL at the point, and again while the run replays its journal;
- full: from the point on, every write fails for lack of space, until the next life;
- signal: SIGINT at the point, and SIGTERM at the next.

The recipe makes the engine's schedule a function of the samples alone: a slot for every sample, prompts of one token,
and a poll after every token. So a resumed run equals, token for token, the run without a crash, and the ends of both
can be compared: the groups of each step with their tokens, versions and routes exactly, every metric except times, and
the final parameters. No routes are missing: they are in the journal's record of their tokens.

With an environment, each turn is on disk before the environment acts, and the duration of that write decides which
episode finishes first. With images, prompts have many tokens, and samples wait for the one that computes their common
prompt. In both kinds, steps are therefore synchronous: a step trains on the groups that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from april import EnvStep, Sample, Turn
from april.commands import main as command_line
from april.config.settings.model_settings import ModelSettings
from april.images.support import load_images
from april.reporting.metrics_log import read_metrics
from april.reporting.step_log import StepLog
from april.rollout.batch import RolloutBatch
from april.rollout.journal.journal import Journal
from april.training.local import LocalLearner
from april.training.policy import load_policy
from tests import tiny, vision

MODES = ("kill", "power", "twice", "full", "signal")
TASK = 'kind = "environment"\nprompt = "A"\ncorrect_at = 1.0'
ENVIRONMENT = """[environment]
path = "tests.crash_points:Echo"
max_turns = 4
workers = 0
"""
RECIPE = """
[model]
path = "policy"
[task]
kind = "records"
path = "data.jsonl"
reward = "tests.crash_points:reward"
eval_size = 4
[rollout]
rollout_batch_size = 2
over_sampling_batch_size = 5
n_samples_per_prompt = 3
max_response_length = 16
max_staleness = 3
stop_token_ids = [20, 21, 22, 23, 24, 25, 26, 27]
reward_workers = 0
[engine]
max_num_seqs = 64
context_length = 64
stream_interval = 1
[algorithm]
kl_coef = 0.0
[training]
steps = 4
learning_rate = 1e-3
eval_samples = 1
eval_interval = 2
save_interval = 2
keep_checkpoints = 1
journal_flush_seconds = 0.0
threads = 1
[reporting]
trackers = []
"""
SYNCHRONOUS = RECIPE.replace("over_sampling_batch_size = 5\n", "partial_rollout = false\n")
RECIPES = {
    "responses": RECIPE,
    "episodes": SYNCHRONOUS.replace(
        'kind = "records"\npath = "data.jsonl"\nreward = "tests.crash_points:reward"', TASK
    ).replace("[rollout]", ENVIRONMENT + "[rollout]"),
    "mixture": RECIPE.replace("[training]", '[training]\nrouter_replay = "recorded"'),
    "images": SYNCHRONOUS.replace("[rollout]", 'image_column = "images"\n[rollout]').replace(
        "context_length = 64", "context_length = 128"
    ),
}
"""By kind of run."""
NOT_COMPARED = (
    "seconds",
    "per_second",
    "occupancy",
    "idle_slots",
    "samples_interrupted",
    "samples_resumed",
    "kv_cache_bytes",
    "resident_bytes",
)
"""What depends on the clock, and on how many pieces a step was collected in."""


def reward(response: str, answer: str | None) -> float:
    """Some signal: how many of the characters come before "P"."""
    return sum(c < "P" for c in response) / max(len(response), 1)


class Echo:
    """Reports and rewards the number of letters that it has received; ends by chance."""

    async def reset(self, prompt: Any, seed: int) -> str:
        self.rng, self.heard = random.Random(seed), 0
        return "B"

    async def step(self, turn: Turn) -> EnvStep:
        self.heard += len(turn.text)
        return EnvStep(str(self.heard), len(turn.text) / 16, self.rng.random() < 0.2, {"heard": self.heard})

    def close(self) -> None:
        pass


def _state(task: Path) -> str:
    """Of a thread or process, as Linux has it."""
    return (task / "stat").read_text().rpartition(") ")[2][0]


class Points:
    """Counts the durable writes of this process, and lets something happen at one of them."""

    def __init__(self, directory: Path, at: int, happen: Callable[[Points], None]) -> None:
        self.directory = directory
        self.at = at
        self.happen = happen
        self.passed = 0
        self.failing = False
        self.synced: dict[int, int] = {}
        self._one_at_a_time = threading.RLock()
        """Data that another thread writes during a point would be missing in the process copy that loses power."""
        for owner, name in (
            (os, "rename"),
            (os, "replace"),
            (shutil, "rmtree"),
            (torch, "save"),
            (Path, "write_text"),
            (StepLog, "write"),
            (Journal, "remove"),
            (Journal, "commit"),
        ):
            setattr(owner, name, self.counted(getattr(owner, name)))
        os.fsync = self.counted(self.seen(os.fsync))

    def counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        rmtree = shutil.rmtree

        def point(*args: Any, **kwargs: Any) -> Any:
            with self._one_at_a_time:
                self.reached()
                if self.failing and write is not rmtree:  # removing takes no space
                    raise OSError(errno.ENOSPC, "No space left on device")
                result = write(*args, **kwargs)
                self.reached()
                return result

        return point

    def reached(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            self.happen(self)

    def seen(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            self.synced[status.st_ino] = status.st_size

        return sync

    def lose_power(self) -> None:
        """Drop all data that was not synced. A copy of this process does it, while all threads of this process are
        stopped: their syncs and renames during that time would not match a power loss."""
        victim = os.getpid()
        if os.fork():
            time.sleep(60)
        os.kill(victim, signal.SIGSTOP)
        while any(_state(task) != "T" for task in Path(f"/proc/{victim}/task").iterdir()):
            time.sleep(0.001)
        for path in self.directory.rglob("*"):
            if not path.is_file() or path.name == "lock":
                continue
            size = path.stat().st_size
            kept = self.synced.get(path.stat().st_ino, 0)
            if path.suffix == ".events":
                kept += self.at * 7919 % (max(size - kept, 0) + 1)  # any part of the unsynced data may be there
            os.truncate(path, min(size, kept))
        os.kill(victim, signal.SIGKILL)
        os._exit(0)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def run_full(self) -> None:
        self.failing = True

    def interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM if self.at % 2 else signal.SIGINT)


class Life:
    """Outcome of a process: exit status, output on stderr, and number of points passed."""

    def __init__(self, status: int, stderr: str, passed: int) -> None:
        self.status = status
        self.stderr = stderr
        self.passed = passed


def live(
    base: Path, run: Path, at: int = 0, happen: Callable[[Points], None] = Points.die, kind: type[Points] = Points
) -> Life:
    """Start or resume the run in a child, and let it meet its fate at point `at`."""
    (base / "ledger").mkdir(exist_ok=True)
    resume = (run / "recipe.json").exists()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                os.dup2(os.open(base / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            points = kind(run, at, happen)
            train = LocalLearner.train

            def noted(self: LocalLearner, step: RolloutBatch, number: int) -> dict[str, float]:
                note(base, step, number)
                return train(self, step, number)

            LocalLearner.train = noted  # type: ignore[method-assign]
            sys.argv = ["april", "train", *(["--resume", str(run)] if resume else [str(base / "recipe.toml")])]
            sys.argv += [] if resume else ["--output", str(run)]
            try:
                command_line.main()
            except SystemExit as ended:
                status = int(ended.code or 0)
            (base / "passed").open("w").write(str(points.passed))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    passed = base / "passed"
    count = int(passed.read_text()) if passed.exists() else 0
    passed.unlink(missing_ok=True)
    return Life(os.waitstatus_to_exitcode(status), (base / "stderr").read_text(), count)


def note(base: Path, step: RolloutBatch, number: int) -> None:
    """The groups of each step, in a file for each life."""
    content = [
        [
            group.id,
            [
                [s.index, s.prompt_ids, s.response_ids, s.versions.tolist(), s.reward, str(s.finish), _routes(s)]
                for s in group.samples
            ],
        ]
        for group in step.groups
    ]
    names = (base / "ledger" / f"{number}-{life}.json" for life in itertools.count())
    name = next(name for name in names if not name.exists())
    with name.open("w") as file:
        json.dump(content, file)


def _routes(sample: Sample) -> list[Any] | None:
    return None if sample.routes is None else np.sort(sample.routes.experts, -1).tolist()  # type: ignore[no-any-return]


def outcome(base: Path, run: Path) -> dict[str, Any]:
    """What a finished run amounts to."""
    metrics = [
        {name: value for name, value in line.items() if not any(word in name for word in NOT_COMPARED)}
        for line in read_metrics(run)
    ]
    assert not any(line.get("missing_routes") for line in metrics), "routes are missing"
    trained: dict[str, Any] = {}
    for path in sorted((base / "ledger").iterdir()):
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError:
            continue  # a write in another thread was the crash's point: this life ended before it trained on the step
        number = path.name.partition("-")[0]
        assert trained.setdefault(number, content) == content, f"step {number} was trained on twice, differently"
    ids = [id for content in trained.values() for id, _ in content]
    assert len(ids) == len(set(ids)), "a group was trained on in two steps"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["discarded_tokens"] == 0
    weights = load_file(run / "checkpoints" / "step-000004" / "model.safetensors")
    return {"metrics": metrics, "trained": trained, "weights": weights}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    problems = []
    if found["trained"] != expected["trained"]:
        problems.append("the steps were trained on other groups or tokens")
    if len(found["metrics"]) != len(expected["metrics"]):
        problems.append(f"{len(found['metrics'])} lines of metrics instead of {len(expected['metrics'])}")
    for mine, other in zip(found["metrics"], expected["metrics"], strict=False):
        names = [name for name in mine.keys() | other.keys() if not alike(mine.get(name), other.get(name))]
        problems += [f"step {other['step']}: {name} = {mine.get(name)} and not {other.get(name)}" for name in names]
    for name, tensor in expected["weights"].items():
        if not torch.allclose(found["weights"][name], tensor, rtol=1e-3, atol=1e-4):
            problems.append(f"the final {name} differs by {(found['weights'][name] - tensor).abs().max():g}")
    return problems


def alike(mine: Any, other: Any) -> bool:
    """Equal, up to the rounding of a KV cache that was computed in other portions."""
    if isinstance(mine, float) and isinstance(other, float):
        return math.isclose(mine, other, rel_tol=1e-3, abs_tol=1e-5)
    return bool(mine == other)


def prepare(base: Path, kind: str = "responses") -> None:
    """The policy, the data and the recipe of the tiny run."""
    records: list[dict[str, Any]] = [{"prompt": chr(65 + i), "answer": ""} for i in range(26)]
    if kind == "images":
        vision.save(base / "policy", num_hidden_layers=2)
        for number, record in enumerate(records):
            vision.picture(base / f"{number % 5}.png", mark=number % 5)
            record |= {"prompt": f"<image>{record['prompt']}", "images": [f"{number % 5}.png"]}
        load_images(str(base / "policy"))  # imports what the children would import each
    else:
        tiny.save(base / "policy", num_hidden_layers=1)
    if kind == "mixture":
        tiny.mixture(num_hidden_layers=1).save_pretrained(base / "policy")
    (base / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    (base / "recipe.toml").write_text(RECIPES[kind])


class Sweep:
    """The tiny run without a crash, and the same with a crash at a chosen point."""

    def __init__(self, base: Path, kind: str) -> None:
        self.base = base
        prepare(base, kind)
        load_policy(ModelSettings(path=str(base / "policy")))  # imports what the children would import each
        life, self.expected = self._run("reference", [])
        assert life.status == 0, life.stderr
        steps = [line for line in self.expected["metrics"] if line["step"]]
        assert all(("missing_routes" in line) == (kind == "mixture") for line in steps)
        self.points = life.passed

    def _run(self, name: str, fates: list[tuple[int, Callable[[Points], None]]]) -> tuple[Life, dict[str, Any]]:
        shutil.rmtree(self.base / "ledger", ignore_errors=True)
        run = self.base / name
        for at, happen in fates:
            life = live(self.base, run, at, happen)
            assert "Traceback" not in life.stderr, life.stderr
            if life.status == 0:
                break
        else:
            life = live(self.base, run)
        result = outcome(self.base, run) if life.status == 0 else {}
        shutil.rmtree(run)
        return life, result

    def crash(self, mode: str, at: int) -> list[str]:
        """What differs from the run without a crash; nothing, if all is well."""
        fates: dict[str, list[tuple[int, Callable[[Points], None]]]] = {
            "kill": [(at, Points.die)],
            "power": [(at, Points.lose_power)],
            "twice": [(at, Points.die), (1 + at % 40, Points.die)],
            "full": [(at, Points.run_full)],
            "signal": [(at, Points.interrupt), (1 + at % 40, Points.interrupt)],
        }
        try:
            life, result = self._run("run", fates[mode])
            return differences(result, self.expected) if life.status == 0 else [f"status {life.status}: {life.stderr}"]
        except (AssertionError, OSError, ValueError, KeyError) as error:
            shutil.rmtree(self.base / "run", ignore_errors=True)
            return [f"{type(error).__name__}: {error}"]

    def sweep(self, modes: list[str], stride: int, report: Callable[[str], None]) -> dict[str, Any]:
        """Crash at every `stride`-th point of each mode, each mode from another first one."""
        began = time.monotonic()
        results: dict[str, Any] = {}
        for number, mode in enumerate(modes):
            tried = range(1 + number * stride // len(modes), self.points + 1, stride)
            failed = {}
            for at in tried:
                if problems := self.crash(mode, at):
                    failed[at] = problems[:3]
                    report(f"{mode} at point {at}: {'; '.join(problems[:3])}")
            results[mode] = {"tried": len(tried), "passed": len(tried) - len(failed), "failed": failed}
            report(f"{mode}: {results[mode]['passed']} of {len(tried)}, {time.monotonic() - began:.0f} s")
        return {"points": self.points, "stride": stride, "modes": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="try every n-th point")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--kind", default="responses", choices=RECIPES)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        sweep = Sweep(Path(directory), args.kind)
        result = sweep.sweep(args.modes, args.stride, lambda line: print(line, flush=True))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    sys.exit(any(mode["failed"] for mode in result["modes"].values()))


if __name__ == "__main__":
    main()
