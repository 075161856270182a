"""What overlap brings a real run: the quickstart's recipe with generation beside training, against the same in turns.

Engine and trainer have a core each, as they would have GPUs: the embedded engine in a process of its own on one, all
else (trainer, scheduler, journal, scores) on the other. Both arms are pinned alike and differ in `trainer.overlap`
alone: same recipe, bound, N' and steps. They are interleaved, the first one of a pair by turns. Time is the run's own,
from its first rollout to the end of its last evaluation; starting Python and loading the model are not in it.

`trainer_share` is the trainer's time as a share of the rollouts', in the arm that alternates: overlap can bring at most
1 + min(share, 1 / share) times the speed, and less by what the two take from each other.

    python benchmarks/overlap_real.py                 # 3 pairs
    python benchmarks/overlap_real.py --pairs 1       # adds a pair to those in the file
    python benchmarks/overlap_real.py --engine vllm   # a real vLLM server in place of the embedded engine
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import save, spread

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples/gcd/recipe.toml"
ARMS = ("alternating", "overlapping")
AIM = 1.25
TRAINER_CORE, ENGINE_CORE = 0, 1
ENGINES = {"embedded": "april.engines.embedded.process_main", "vllm": "vllm"}
"""What the command line of the engine's process holds."""


def children(pid: int) -> list[int]:
    """All processes that `pid` started, and those that they did."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def pin_engine(trainer: subprocess.Popen[str], mark: str) -> int:
    """Put the engine's process on its own core, as soon as there is one; its pid."""
    while trainer.poll() is None:
        for pid in children(trainer.pid):
            if mark in Path(f"/proc/{pid}/cmdline").read_text():
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(task), {ENGINE_CORE})
                return pid
        time.sleep(0.02)
    raise RuntimeError(f"the run ended before its engine began: {trainer.communicate()[1]}")


def processor_seconds(pid: int) -> float:
    """What a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(arm: str, options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """One run."""
    command = [sys.executable, "-m", "april", "train", str(RECIPE), "--steps", str(options.steps)]
    command += ["--overlap", str(arm == "overlapping"), "--threads", "1", "--trackers", "--output", str(directory)]
    command += ["--save-interval", "0", *options.flags]
    if options.engine == "embedded":
        command += ["--own-process", "--over-sampling-batch-size", str(options.under_way)]
    with open(directory.with_suffix(".log"), "w") as log:
        trainer = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {TRAINER_CORE}),
        )
        engine, busy = pin_engine(trainer, ENGINES[options.engine]), [0.0, 0.0]
        while trainer.poll() is None:
            try:
                busy = [processor_seconds(trainer.pid), processor_seconds(engine)]
            except (FileNotFoundError, ProcessLookupError):
                break
            time.sleep(0.1)
    if trainer.wait():
        raise RuntimeError(directory.with_suffix(".log").read_text())
    summary = json.loads((directory / "summary.json").read_text())
    return {
        **{name: summary[name] for name in ("seconds", "rollout_seconds", "train_seconds", "eval_seconds")},
        **{name: summary[name] for name in ("consumed_tokens", "staleness_mean", "staleness_max", "accuracy")},
        "trainer_processor_seconds": busy[0],
        "engine_processor_seconds": busy[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--under-way", type=int, default=48, help="N' of both arms")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded")
    parser.add_argument("flags", nargs="*", help="further flags of april train, behind --")
    options = parser.parse_args()
    variant = "" if options.engine == "embedded" else options.engine
    path = Path(__file__).with_name(f"{Path(__file__).stem}{variant and '_'}{variant}.json")
    settings = {"steps": options.steps, "under_way": options.under_way, "flags": options.flags}
    pairs: list[dict[str, Any]] = []
    if path.exists() and (before := json.loads(path.read_text()))["settings"] == settings:
        pairs = before["pairs"]
    for _ in range(options.pairs):
        order = ARMS if len(pairs) % 2 == 0 else ARMS[::-1]
        with tempfile.TemporaryDirectory() as folder:
            pair = {arm: measure(arm, options, Path(folder) / arm) for arm in order}
        pairs.append(pair)
        gains = [pair["alternating"]["seconds"] / pair["overlapping"]["seconds"] for pair in pairs]
        rates = [
            pair["overlapping"]["consumed_tokens"]
            / pair["overlapping"]["seconds"]
            / (pair["alternating"]["consumed_tokens"] / pair["alternating"]["seconds"])
            for pair in pairs
        ]
        shares = [pair["alternating"]["train_seconds"] / pair["alternating"]["rollout_seconds"] for pair in pairs]
        results = {
            "settings": settings,
            "aim": AIM,
            "times_the_wall_clock": spread(gains),
            "times_the_consumed_tokens_per_second": spread(rates),
            "trainer_share": spread(shares),
            "pairs": pairs,
        }
        print(f"written: {save(__file__, results, variant)}: {gains[-1]:.2f} times the speed", flush=True)
        print(json.dumps(pairs[-1]), flush=True)


if __name__ == "__main__":
    main()
