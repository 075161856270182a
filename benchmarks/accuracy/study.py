"""The accuracy study: a grid of small `april train` runs, each of which adds a JSON line to `study.jsonl` at its end.

- `main`: three tasks × GRPO, DAPO, GSPO × synchronous and partial rollouts, at the same engine slots;
- `staleness`: gcd with GRPO: N'/N × the bound × the correction. The learning rate is high enough for staleness to bite;
- `long`: factors, the task on which partial rollouts ended lower, with three times the steps: does the gap stay?
- `keep`: GRPO with partial rollouts that keep their KV caches across updates, on the three tasks.

Every sample in flight has a slot, so that a started sample is sampled at once.

Cells run in order of importance, seed by seed, so that the results are balanced at any moment. A cell that is in the
file is not run again; several processes may work on one file.

Invariants:
- a cell is written whole, in one line, after it has ended; a killed process leaves no trace of the cell it was in;
- seconds are CPU time of the process, so that other load on the machine counts little; accuracy depends on no time.
  With an engine in a separate process they are wall-clock seconds, and CPU time is the sum over both processes;
- a cell that fails is a result, with its error.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/study.py --cells 3
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import fcntl
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from april.config.checking import check_recipe
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.reporting.metrics import busy_seconds
from april.reporting.metrics_log import read_metrics
from april.training.build import train
from april.training.recovery import TrainingError

HERE = Path(__file__).parent

TASKS = ("gcd", "primes", "factors")
ALGORITHMS = ("grpo", "dapo", "gspo")
CORRECTIONS = ("none", "behaviour", "decoupled", "tis", "icepop")
"""As recorded in `study.jsonl`: april calls the correction `behaviour` `rollout_logprobs` today."""
OVER_SAMPLING = (1.5, 2.0, 3.0, 4.0)
BOUNDS = (1, 2, 5, None)
ARMS = ((1.0, 0), (2.0, 5))
"""N'/N and `max_staleness` of synchronous and of partial rollouts."""

LONGER = 3
"""How many times the steps of the other grids `long` has."""

NO_BOUND = 10**6
"""A `max_staleness` that nothing reaches."""

DIAGNOSTICS = ("clip_fraction", "masked_fraction", "capped_fraction", "kl_behaviour", "grad_norm", "entropy")


class Keyed(Protocol):
    """A run of a study."""

    @property
    def key(self) -> str: ...


K = TypeVar("K", bound=Keyed)


class Training(Keyed, Protocol):
    """What `run` runs: a frozen dataclass, whose fields the line in the file begins with."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def recipe(self, output: Path) -> Recipe: ...

    def more(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        over_sampling: N'/N; 1 is synchronous.
        max_staleness: the bound; None is none.
    """

    grid: str
    task: str
    algorithm: str
    correction: str
    over_sampling: float
    max_staleness: int | None
    seed: int

    @property
    def key(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))

    def more(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Metrics kept of a run's steps, in addition to `measured`."""
        return {}

    def recipe(self, output: Path) -> Recipe:
        recipe = load_recipe(HERE / f"{self.task}.toml")
        rollout = recipe.rollout
        rollout.partial_rollout = self.over_sampling > 1
        rollout.over_sampling_batch_size = round(self.over_sampling * rollout.rollout_batch_size)
        rollout.max_staleness = NO_BOUND if self.max_staleness is None else self.max_staleness
        recipe.algorithm.algorithm = self.algorithm
        recipe.algorithm.correction = "rollout_logprobs" if self.correction == "behaviour" else self.correction
        recipe.training.seed = self.seed
        recipe.training.steps *= LONGER if self.grid == "long" else 1
        recipe.engine.on_update = "keep" if self.grid == "keep" else "recompute"
        recipe.reporting.output = str(output)
        under_way = rollout.over_sampling_batch_size * rollout.n_samples_per_prompt
        recipe.engine.max_num_seqs = max(recipe.engine.max_num_seqs, under_way)
        check_recipe(recipe)
        return recipe


def main_cells(seed: int) -> list[Cell]:
    return [Cell("main", t, a, "behaviour", *arm, seed) for t in TASKS for a in ALGORITHMS for arm in ARMS]


def long_cells(seed: int) -> list[Cell]:
    return [Cell("long", "factors", a, "behaviour", *arm, seed) for a in ("grpo", "dapo") for arm in ARMS]


def keep_cells(seed: int) -> list[Cell]:
    return [Cell("keep", task, "grpo", "behaviour", *ARMS[1], seed) for task in TASKS]


def staleness_cells(seed: int) -> list[Cell]:
    """Every combination that differs from the others and is not in the main grid: a bound S allows N'/N up to S + 1."""
    return [
        Cell("staleness", "gcd", "grpo", correction, alpha, bound, seed)
        for alpha in OVER_SAMPLING
        for bound in reversed(BOUNDS)
        if bound is None or alpha <= bound + 1
        for correction in CORRECTIONS
        if (correction, alpha, bound) != ("behaviour", 2.0, 5)
    ]


def all_cells() -> list[Cell]:
    """In order of importance: the ends of the staleness grid before what lies between them, no bound before a bound."""
    main, staleness = [main_cells(seed) for seed in range(8)], [staleness_cells(seed) for seed in range(5)]
    free = [[c for c in cells if c.max_staleness is None] for cells in staleness]
    ends = [[c for c in cells if c.over_sampling in (2, 4)] for cells in free]
    blocks = [
        main[0],
        ends[0],
        main[1],
        ends[1],
        *main[2:5],
        ends[2],
        *(keep_cells(seed) for seed in range(5)),
        *free[:3],
        *(long_cells(seed) for seed in range(5)),
        *staleness[:3],
        *ends[3:],
        *staleness[3:],
        *main[5:],
    ]
    return list(dict.fromkeys(cell for block in blocks for cell in block))


class CpuLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is CPU time, so that a step's seconds are too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._cpu = clock

    def time(self) -> float:
        return self._cpu()


def cpu_seconds() -> float:
    """What this process, and those it started that have ended, have taken so far."""
    return sum(os.times()[:4])


def run(cell: Training, cpu: Callable[[], float] | None = None) -> dict[str, Any]:
    """Train and evaluate one cell; the line of it in the file. `cpu` is the CPU time so far of all that takes part, if
    that is more than this process and its children."""
    record: dict[str, Any] = {"key": cell.key, **dataclasses.asdict(cell)}
    taken = cpu or cpu_seconds
    began = taken()
    with tempfile.TemporaryDirectory() as directory:
        recipe = cell.recipe(Path(directory) / "run")
        apart = recipe.engine.own_process
        clock = time.perf_counter if apart else cpu or time.process_time
        try:
            with asyncio.Runner(loop_factory=None if apart else lambda: CpuLoop(clock)) as runner:
                summary = runner.run(train(recipe, clock=clock))
        except TrainingError as error:
            summary, record["error"] = None, str(error)
        else:
            if summary is None:
                raise KeyboardInterrupt
        metrics = list(read_metrics(Path(recipe.reporting.output)))
        record |= measured(recipe, metrics, summary) | cell.more([m for m in metrics if m["step"]])
    record["cpu_seconds"] = round(taken() - began, 2)
    gc.collect()
    return record


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    """The mean over the steps that have the metric: a step without a signal has no entropy, for example."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return round(sum(values) / max(len(values), 1), 6)


def measured(recipe: Recipe, metrics: Sequence[dict[str, Any]], summary: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of a run.

    `evaluations` holds for each evaluation: step, samples that were complete by then (including rejected ones of
    dynamic sampling), tokens generated, CPU seconds of rollouts and training, accuracy.
    """
    samples, seconds, evaluations = 0, 0.0, []
    steps = [m for m in metrics if m["step"]]
    for m in metrics:
        if m["step"]:
            samples += (m["groups_consumed"] + m["groups_rejected"]) * recipe.rollout.n_samples_per_prompt
            seconds += busy_seconds(m)
        if "accuracy" in m:
            tokens = m.get("generated_tokens", 0)
            evaluations.append([m["step"], samples, tokens, round(seconds, 2), round(m["accuracy"], 4)])
    record: dict[str, Any] = {
        "evaluations": evaluations,
        "rewards": [round(m["reward"], 4) for m in steps],
        "diagnostics": {name: _mean(steps, name) for name in DIAGNOSTICS},
        "largest_weight": round(max((m["ratio_max"] for m in steps), default=1.0), 3),
        "learning_rate": recipe.training.learning_rate,
        "steps": len(steps),
    }
    if summary:
        kept = ("consumed_tokens", "generated_tokens", "discarded_tokens", "rejected_tokens")
        more = ("off_policy_token_share", "rollout_seconds", "train_seconds")
        record |= {name: round(summary[name], 4) for name in (*kept, *more)}
        if "overlap_seconds" in summary:
            record["overlap_seconds"] = round(summary["overlap_seconds"], 4)
        record |= {
            "mean_staleness": round(summary["staleness_mean"], 4),
            "max_staleness_seen": summary["staleness_max"],
        }
    return record


def recorded(path: Path) -> list[dict[str, Any]]:
    """The cells that have ended. A line that a full disk or a power cut left torn is not one."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


@contextmanager
def claimed(cell: Keyed, path: Path) -> Iterator[bool]:
    """Whether no other process is at this cell; the claim ends with the process at the latest."""
    locks = path.parent / "runs" / path.stem
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / cell.key).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def run_cells(
    cells: Sequence[K], path: Path, limit: int | None = None, run: Callable[[K], dict[str, Any]] = run
) -> int:
    """Run the first `limit` of `cells` that are not in the file `path` yet by `run`, and return how many there were."""
    ended = 0
    for cell in cells:
        if limit is not None and ended >= limit:
            break
        with claimed(cell, path) as free:
            if not free or any(record["key"] == cell.key for record in recorded(path)):
                continue
            record = run(cell)
            torn = path.exists() and not path.read_text().endswith("\n")
            with path.open("a") as file:
                file.write("\n" * torn + json.dumps(record) + "\n")
            ended += 1
            accuracy = record["evaluations"][-1][-1] if record["evaluations"] else float("nan")
            print(f"{cell.key}  {accuracy:.3f}  {record['cpu_seconds']:.0f} s", flush=True)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "study.jsonl")
    parser.add_argument("--cells", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    if not run_cells(all_cells(), arguments.output, arguments.cells):
        raise SystemExit(3 if arguments.cells else 0)


if __name__ == "__main__":
    main()
