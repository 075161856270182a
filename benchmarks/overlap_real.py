"""Gain of overlap in a real run: the quickstart's recipe with generation during training, against alternation.

Engine and trainer have a core each, as they would have GPUs: the embedded engine in a separate process on one core,
everything else (trainer, scheduler, journal, scores) on the other. Both arms are pinned equally and differ only in
`trainer.overlap`: same recipe, bound, N' and steps. They are interleaved in alternating order. Time is the run's own,
from its first rollout to the end of its last evaluation, without starting Python and loading the model.

`trainer_share` is the trainer's time as a share of the rollouts' time, in the arm that alternates: overlap can bring at
most 1 + min(share, 1 / share) times the speed, less the slowdown that the two cause each other.

    python benchmarks/overlap_real.py                 # 3 pairs
    python benchmarks/overlap_real.py --pairs 1       # adds a pair to those in the file
    python benchmarks/overlap_real.py --engine vllm   # a real vLLM server in place of the embedded engine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from record import save, spread

from april.engines.servers.launch import Launch, Server, launch_vllm

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples/gcd/recipe.toml"
ARMS = ("alternating", "overlapping")
AIM = 1.25
TRAINER_CORE, ENGINE_CORE = 0, 1


def children(pid: int) -> list[int]:
    """All processes that `pid` started, and those that they did."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def pin_engine(trainer: subprocess.Popen[str]) -> int:
    """Put the embedded engine's process on its own core, as soon as there is one; its pid."""
    while trainer.poll() is None:
        for pid in children(trainer.pid):
            if "april.engines.host_process_main" in Path(f"/proc/{pid}/cmdline").read_text():
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(task), {ENGINE_CORE})
                return pid
        time.sleep(0.02)
    raise RuntimeError("the run ended before its engine began")


def processor_seconds(pid: int) -> float:
    """What a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(arm: str, options: argparse.Namespace, directory: Path, server: Server | None) -> dict[str, float]:
    """One run."""
    command = [sys.executable, "-m", "april", "train", str(RECIPE), "--steps", str(options.steps)]
    command += ["--overlap", str(arm == "overlapping"), "--threads", "1", "--trackers", "--output", str(directory)]
    command += ["--save-interval", "0", "--over-sampling-batch-size", str(options.under_way), *options.flags]
    if server is None:
        command.append("--own-process")
    else:  # vLLM streams every token where it keeps caches, which would be the trainer's core's business
        command += ["--engine", "vllm", "--urls", server.url, "--on-update", "recompute"]
    log = directory.with_suffix(".log")
    with log.open("w") as file:
        trainer = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {TRAINER_CORE}),
        )
        engines = [pin_engine(trainer)] if server is None else [server.process.pid, *children(server.process.pid)]
        before, busy = sum(map(processor_seconds, engines)), (0.0, 0.0)
        while trainer.poll() is None:
            with suppress(FileNotFoundError, ProcessLookupError):
                busy = processor_seconds(trainer.pid), sum(map(processor_seconds, engines)) - before
            time.sleep(0.1)
    if trainer.wait():
        raise RuntimeError(log.read_text())
    summary = json.loads((directory / "summary.json").read_text())
    return {
        **{name: summary[name] for name in ("seconds", "rollout_seconds", "train_seconds", "eval_seconds")},
        **{name: summary[name] for name in ("consumed_tokens", "staleness_mean", "staleness_max", "accuracy")},
        "trainer_processor_seconds": busy[0],
        "engine_processor_seconds": busy[1],
    }


@asynccontextmanager
async def serving(options: argparse.Namespace, folder: Path) -> AsyncIterator[Server | None]:
    """A vLLM server on the engine's core, for all runs; None for the embedded engine."""
    if options.engine == "embedded":
        yield None
        return
    os.sched_setaffinity(0, {ENGINE_CORE})  # processes started from here on stay on it
    arguments = ["--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(2**29), "--dtype", "float32"]
    arguments += ["--max-model-len", "576", "--max-num-seqs", "128", "--skip-tokenizer-init"]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": str(ENGINE_CORE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    how = Launch(log_dir=folder, python=options.server_python, arguments=arguments, environment=variables)
    async with launch_vllm(RECIPE.parent / "model", how) as server:
        yield server


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--under-way", type=int, default=48, help="N' of both arms")
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--server-python", type=Path, default=ROOT / ".servers/vllm/bin/python")
    parser.add_argument("flags", nargs="*", help="further flags of april train, behind --")
    options = parser.parse_args()
    variant = "" if options.engine == "embedded" else options.engine
    path = Path(__file__).with_name(f"{Path(__file__).stem}{variant and '_'}{variant}.json")
    settings = {"steps": options.steps, "under_way": options.under_way, "flags": options.flags}
    pairs: list[dict[str, Any]] = []
    if path.exists() and (before := json.loads(path.read_text()))["settings"] == settings:
        pairs = before["pairs"]
    with tempfile.TemporaryDirectory() as folder:
        async with serving(options, Path(folder)) as server:
            for _ in range(options.pairs):
                order = ARMS if len(pairs) % 2 == 0 else ARMS[::-1]
                places = {arm: Path(folder) / f"{len(pairs)}-{arm}" for arm in order}
                pair = {arm: await asyncio.to_thread(measure, arm, options, places[arm], server) for arm in order}
                pairs.append(pair)
                print(f"written: {save(__file__, results_of(settings, pairs), variant)}", flush=True)
                print(json.dumps(pair), flush=True)


def results_of(settings: dict[str, Any], pairs: list[dict[str, Any]]) -> dict[str, Any]:
    def ratios(of: Callable[[dict[str, float]], float]) -> dict[str, float]:
        return spread([of(pair["overlapping"]) / of(pair["alternating"]) for pair in pairs])

    shares = [pair["alternating"]["train_seconds"] / pair["alternating"]["rollout_seconds"] for pair in pairs]
    return {
        "settings": settings,
        "aim": AIM,
        "times_the_wall_clock": ratios(lambda run: 1 / run["seconds"]),
        "times_the_consumed_tokens_per_second": ratios(lambda run: run["consumed_tokens"] / run["seconds"]),
        "trainer_share": spread(shares),
        "pairs": pairs,
    }


if __name__ == "__main__":
    asyncio.run(main())
