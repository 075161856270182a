"""The study of the defaults: which settings reach a target soonest on an accelerator's clock?

The protocol is in `docs/reports/defaults.md`. Each run adds a JSON line to `defaults.jsonl` when it ends; runs in the
file are not run again, so the study continues with more seeds, tasks, algorithms or arms by the same command.

Invariants: as in `study.py`, and
- the arms of a seed run one after another, and differ in nothing but the settings in `ARMS`;
- seconds are those of `accelerator.py`, with CPU seconds beside them.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/defaults.py                        # GRPO on the quickstart
    OMP_NUM_THREADS=1 python benchmarks/accuracy/defaults.py --tasks gcd factors primes --algorithms grpo dapo gspo
    python benchmarks/accuracy/defaults_analysis.py
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerator import Accelerator, AcceleratorLoop
from study import ALGORITHMS, HERE, run_cells

from april.config.checking import check_recipe
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.reporting.metrics_log import read_metrics
from april.training.build import open_trainer
from april.training.recovery import TrainingError

EXAMPLES = HERE.parents[1] / "examples"
SEEDS = range(1200, 1208)


@dataclass(frozen=True)
class Task:
    """A recipe, and how it is shortened.

    Args:
        steps: steps that are run; the learning rate's schedule is the recipe's, over all of its steps.
        rate: the peak learning rate of all arms.
        target: held-out reward; None for nine tenths of the way from the start to the end of synchronous runs.
        updates: optimizer updates of a step; None for the recipe's number.
    """

    recipe: Path
    steps: int
    rate: float
    target: float | None = None
    eval_interval: int = 2
    eval_samples: int = 1
    updates: int | None = None


TASKS = {
    "quickstart": Task(EXAMPLES / "gcd/recipe.toml", 12, 3e-4, 0.80),
    "gcd": Task(HERE / "gcd.toml", 12, 1.7e-4),
    "factors": Task(HERE / "factors.toml", 12, 1.7e-4),
    "primes": Task(HERE / "primes.toml", 12, 8.5e-5),
    "gcd_one_update": Task(HERE / "gcd.toml", 12, 1.7e-4, updates=1),
    "gcd_tool": Task(EXAMPLES / "gcd_tool/recipe.toml", 24, 3e-4, eval_interval=4),
}

ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"rollout.partial_rollout": False, "rollout.over_sampling_batch_size": 1.0},
    "automatic": {"rollout.over_sampling_batch_size": "auto"},
    "automatic-ramp": {"rollout.over_sampling_batch_size": "auto", "rollout.ramp_steps": 1},
    "automatic-keep": {"rollout.over_sampling_batch_size": "auto", "engine.on_update": "keep"},
    "twice": {"rollout.over_sampling_batch_size": 2.0},
    "twice-ramp": {"rollout.over_sampling_batch_size": 2.0, "rollout.ramp_steps": 1},
    "half-more": {"rollout.over_sampling_batch_size": 1.5},
    "twice-recompute": {"rollout.over_sampling_batch_size": 2.0, "engine.on_update": "recompute"},
    "twice-keep": {"rollout.over_sampling_batch_size": 2.0, "engine.on_update": "keep"},
    "twice-redraft": {"rollout.over_sampling_batch_size": 2.0, "engine.on_update": "redraft"},
    "twice-bound-1": {"rollout.over_sampling_batch_size": 2.0, "rollout.max_staleness": 1},
    "automatic-geometric": {"rollout.over_sampling_batch_size": "auto", "algorithm.correction": "geometric"},
    "automatic-wide": {
        "rollout.over_sampling_batch_size": "auto",
        "algorithm.eps_low": 0.03,
        "algorithm.eps_high": 0.04,
    },
    "twice-decoupled": {"rollout.over_sampling_batch_size": 2.0, "algorithm.correction": "decoupled"},
}
"""Settings of each arm; a number of groups is in N. Arms that name no correction have the run's."""
EARLIER_CORRECTION = "rollout_logprobs"
"""Correction of runs that name none: also of those with GSPO, of which `geometric` became the default by this study."""
FIRST_ARMS = ("synchronous", "automatic", "twice", "automatic-ramp", "twice-ramp")


@dataclass(frozen=True)
class DefaultsRun:
    task: str
    algorithm: str
    arm: str
    seed: int
    scale: float = 1.0
    """Peak learning rate, relative to the task's."""
    correction: str = EARLIER_CORRECTION

    @property
    def key(self) -> str:
        correction = () if self.correction == EARLIER_CORRECTION else (self.correction,)
        return "-".join(map(str, (self.task, self.algorithm, self.arm, self.scale, self.seed, *correction)))

    def recipe(self, output: Path) -> Recipe:
        task = TASKS[self.task]
        recipe = load_recipe(task.recipe)
        recipe.algorithm.algorithm, recipe.algorithm.correction = self.algorithm, self.correction
        training = recipe.training
        training.seed, training.threads, training.save_interval = self.seed, 1, 0
        training.learning_rate = task.rate * self.scale
        training.updates_per_step = task.updates or training.updates_per_step
        training.eval_interval, training.eval_samples = task.eval_interval, task.eval_samples
        recipe.reporting.output, recipe.reporting.trackers = str(output), ()
        for name, value in ARMS[self.arm].items():
            section, setting = name.split(".")
            assert hasattr(getattr(recipe, section), setting), f"there is no {name}"
            if setting == "over_sampling_batch_size" and value != "auto":
                value = round(value * recipe.rollout.rollout_batch_size)
            setattr(getattr(recipe, section), setting, value)
        check_recipe(recipe)
        return recipe


async def first_steps(recipe: Recipe, steps: int, clock: Callable[[], float]) -> dict[str, Any] | None:
    """Run the first steps of a recipe; the learner keeps the schedule of the whole recipe."""
    async with open_trainer(recipe, clock=clock) as trainer:
        trainer.settings = dataclasses.replace(trainer.settings, steps=steps)
        return await trainer.run()


def run(cell: DefaultsRun) -> dict[str, Any]:
    """Train and evaluate, and return the run's line of the file."""
    record: dict[str, Any] = {"key": cell.key, **dataclasses.asdict(cell)}
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        recipe = cell.recipe(Path(directory) / "run")
        loop = AcceleratorLoop()
        accelerator = Accelerator(loop, recipe.engine.max_num_seqs)
        with accelerator.observed(), asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                summary = runner.run(first_steps(recipe, TASKS[cell.task].steps, loop.time))
            except TrainingError as error:
                summary, record["error"] = None, str(error)
            else:
                if summary is None:
                    raise KeyboardInterrupt
        record |= measured(recipe, list(read_metrics(Path(recipe.reporting.output))), accelerator)
    if summary:
        kept = ("consumed_tokens", "generated_tokens", "discarded_tokens", "staleness_mean", "staleness_max")
        record |= {name: round(summary[name], 4) for name in kept}
    record |= {
        "idle_seconds": round(loop.idle, 3),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "wall_seconds": round(time.perf_counter() - wall, 1),
    }
    gc.collect()
    return record


def measured(recipe: Recipe, metrics: Sequence[Mapping[str, Any]], accelerator: Accelerator) -> dict[str, Any]:
    """Return evaluations (step, samples trained on so far, reward, accuracy) and the work of the steps."""
    samples, evaluations = 0, []
    for m in metrics:
        if m["step"]:
            samples += (m["groups_consumed"] + m["groups_rejected"]) * recipe.rollout.n_samples_per_prompt
        if "accuracy" in m:
            evaluations.append([m["step"], samples, round(m["eval_reward"], 4), round(m["accuracy"], 4)])
    steps = [m for m in metrics if m["step"]]
    work = {
        name: [round(getattr(step, name), 3) for step in accelerator.steps] for name in accelerator.steps[0]._fields
    }
    logged = ("over_sampling_batch_size", "reward", "response_length_mean", "staleness_mean", "ess")
    return {
        "evaluations": evaluations,
        **work,
        "by_step": {name: [round(float(m[name]), 4) for m in steps if name in m] for name in logged},
    }


def planned(arguments: argparse.Namespace) -> list[DefaultsRun]:
    """Runs in the order of tasks and algorithms, then seed by seed."""
    return [
        DefaultsRun(task, algorithm, arm, seed, scale, arguments.correction)
        for task in arguments.tasks
        for algorithm in arguments.algorithms
        for scale in arguments.scales
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for arm in arguments.arms
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["quickstart"])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=["grpo"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=FIRST_ARMS)
    parser.add_argument("--scales", nargs="+", type=float, default=[1.0], help="peak learning rates, relative")
    parser.add_argument("--correction", default=EARLIER_CORRECTION, help="correction of arms that name none")
    parser.add_argument("--first-seed", type=int, default=SEEDS[0])
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--output", type=Path, default=HERE / "defaults.jsonl")
    parser.add_argument("--runs", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    run_cells(planned(arguments), arguments.output, arguments.runs, run)


if __name__ == "__main__":
    main()
