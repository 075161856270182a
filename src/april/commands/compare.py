"""`april compare RECIPE`: run one recipe in several arms, each in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.commands.arguments import read_options, read_recipe
from april.commands.failure import fail
from april.config.error import ConfigError
from april.config.recipe import Recipe, recipe_from_dict
from april.reporting.comparison import compare_runs, run_record
from april.secrets import redact
from april.training.stop import forwarding

IN_TURNS = ("--overlap", "False")
"""Flags of arms in which generation and training alternate, as synchronous rollouts require."""


@dataclass(kw_only=True)
class CompareOptions:
    """Compare three arms of a recipe, interleaved, with one run per seed: synchronous rollouts; partial rollouts with
    the same number of engine slots; and synchronous rollouts with a slot for every sample in flight in the partial arm.
    If the recipe overlaps generation with training, partial rollouts have two arms: alternating and overlapping.

    With --ratios, compare synchronous rollouts with partial rollouts at each N'/N: throughput against memory."""

    output: Path = Path("runs/compare")
    """Directory of the runs and compare.json. Runs that are complete there are not repeated."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds, with one run per arm each."""
    ratios: tuple[float, ...] = ()
    """Ratios N'/N to compare, for example 1.5 2 3, in place of the recipe's N'."""
    target_reward: float = 0.8
    """Held-out reward of the time-to-target comparison."""


@dataclass(frozen=True)
class ArmRun:
    """One run of the comparison.

    Args:
        arm: name of the arm.
        seed: random seed of the run.
        directory: output directory of the run.
        flags: flags of `april train`.
    """

    arm: str
    seed: int
    directory: Path
    flags: tuple[str, ...]

    @property
    def summary(self) -> Path:
        return self.directory / "summary.json"


def run(args: list[str]) -> int:
    """`april compare RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, options, flags = read_options(CompareOptions, "april compare", args)
    recipe = read_recipe([path, *flags], "april compare")
    arms = arms_at(recipe, options.ratios) if options.ratios else arms_of(recipe)
    for own in arms.values():
        read_recipe([path, *flags, *own], "april compare")  # before any of them runs
    records = []
    for each in _runs(arms, options, flags):
        if not each.summary.is_file():
            print(f"{each.arm}, seed {each.seed}: {each.directory}", flush=True)
            if status := _train_in_subprocess(path, each.flags):
                return fail(f"{each.arm}, seed {each.seed} ended with status {status}; the other runs are kept", status)
        summary = json.loads(each.summary.read_text())
        slots = recipe_from_dict(summary["recipe"]).slots
        records.append(run_record(each.arm, each.seed, summary, slots, options.target_reward))
    _write(options.output, args, records)
    return 0


def arms_of(recipe: Recipe) -> dict[str, list[str]]:
    """Return the flags of each arm by its name."""
    slots, in_flight = recipe.slots, recipe.rollout_params(partial_rollout=True).over_sampling_batch_size
    # An automatic N' is not known before the run: 2 N stands for it.
    groups = in_flight if isinstance(in_flight, int) else 2 * recipe.rollout.rollout_batch_size
    unlimited = groups * recipe.rollout.n_samples_per_prompt
    partial = ["--partial-rollout", "--max-num-seqs", str(slots)]
    return {
        "synchronous": ["--no-partial-rollout", *IN_TURNS, "--max-num-seqs", str(slots)],
        "partial": [*partial, *IN_TURNS],
        **({"partial, overlapping": partial} if recipe.overlaps else {}),
        "synchronous, unlimited slots": ["--no-partial-rollout", *IN_TURNS, "--max-num-seqs", str(unlimited)],
    }


def arms_at(recipe: Recipe, ratios: Sequence[float]) -> dict[str, list[str]]:
    """Return the arms of --ratios: synchronous, and partial at each N'/N, all with the recipe's slots.

    Raises:
        ConfigError: a ratio is below 1.
    """
    for ratio in ratios:
        if not 1 <= ratio < float("inf"):
            raise ConfigError(f"--ratios {ratio:g}: N' is at least N, so give 1 or more")
    slots = ["--max-num-seqs", str(recipe.slots)]
    partial = {
        f"N'/N = {ratio:g}": [
            "--partial-rollout",
            "--over-sampling-batch-size",
            str(round(ratio * recipe.rollout.rollout_batch_size)),
            *slots,
        ]
        for ratio in ratios
    }
    return {"synchronous": ["--no-partial-rollout", *IN_TURNS, *slots], **partial}


def _runs(arms: dict[str, list[str]], options: CompareOptions, flags: Sequence[str]) -> Iterator[ArmRun]:
    """Yield every arm with every seed, interleaved by seed."""
    for seed in options.seeds:
        for arm, own in arms.items():
            directory = options.output / f"{_file_name(arm)}-{seed}"
            place = ["--seed", str(seed), "--output", str(directory), "--if-exists", "rename"]
            yield ArmRun(arm, seed, directory, (*flags, *own, *place))


def _file_name(arm: str) -> str:
    return re.sub(r"[^\w.]+", "-", arm.replace("N'/N = ", "ratio "))


def _train_in_subprocess(recipe: str, flags: Sequence[str]) -> int:
    """Train in a new process, free of the other arms' caches, threads and memory, and forward signals to it."""
    command = [sys.executable, "-m", "april", "train", recipe, *flags]
    received: list[int] = []
    with forwarding(received.append):
        # A process group of its own, because Ctrl-C in a terminal would otherwise arrive twice.
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0) as child:
            while child.poll() is None:
                time.sleep(0.1)
                # Sent here and not by the handler, which may run before the child exists.
                while received:
                    child.send_signal(received.pop(0))
        return child.returncode


def _write(output: Path, args: Sequence[str], records: list[dict[str, Any]]) -> None:
    """Print the table, and write it with the command, the machine and the runs."""
    output.mkdir(parents=True, exist_ok=True)
    machine = {"system": platform.platform(), "processor": platform.processor(), "cores": os.cpu_count()}
    document = {
        "command": redact(" ".join(["april", "compare", *args])),
        "machine": machine,
        "runs": records,
        "table": compare_runs(records),
    }
    (output / "compare.json").write_text(json.dumps(document, indent=2))
    print(f"written: {output / 'compare.json'}")
