"""The scheduler's share of a step, in processor time: a simulated step without its engines.

1,024 engines of 256 slots, so that every step has 262,144 samples in flight and trains on half of them. The figure
excludes the computations of the simulated engines and of the simulation's own record. Prompts and rewards (which are 0)
count as the scheduler's. The first two steps, in which the engines fill, are excluded. The aim is 2 s.

    OMP_NUM_THREADS=1 python benchmarks/simulation/scheduler_share.py [--trees OTHER_CHECKOUT THIS_CHECKOUT]

With several checkouts each is measured in turn, `--runs` times; the last one with Python's garbage collector on, too,
as `april train` sets it and as Python does. A simulation switches it off.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save, spread

from april.simulation import run as simulation
from april.simulation.engine import SimulatedEngine
from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.replicas import Replicas
from april.simulation.sample_table import SampleTable
from april.simulation.workload import WORKLOADS

SLOTS = 256
FILLING = 2
"""Steps that are left out."""
ENGINES_WORK = {
    SimulatedEngine: ("_start_submitted",),
    Replicas: ("advance", "stop", "stream"),
    SampleTable: ("take_chunks",),
}


class Clock:
    """Processor time that is not the scheduler's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted once, however it calls others."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, began = True, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.process_time() - began

        return timed


CLOCK = Clock()


class TimedEngine(SimulatedEngine):
    """Its work is counted; samples that are submitted one by one are taken in together."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._new: list[Any] = []
        self.submit = self._new.append  # type: ignore[method-assign]

    @property
    def running(self) -> int:
        if self._new:
            self._take_in()
        return super().running

    @property
    def _in_flight(self) -> bool:
        if self._new:
            self._take_in()
        return super()._in_flight

    @CLOCK.of
    def _take_in(self) -> None:
        for sample in self._new:
            SimulatedEngine.submit(self, sample)
        self._new.clear()


for part, names in ENGINES_WORK.items():
    for name in names:
        setattr(part, name, CLOCK.of(getattr(part, name)))


def measure(engines: int, steps: int, collector: str = "off") -> dict[str, float]:
    """Seconds of a step: the scheduler's, and all.

    Args:
        collector: whether Python's garbage collector is off, on as `april` sets it, or as `python` does.
    """
    if collector != "off":
        simulation._without_garbage_collection = nullcontext  # type: ignore[assignment]
    if collector == "april":
        from april.rollout.gc_tuning import raise_gc_thresholds

        assert gc.isenabled()
        raise_gc_thresholds(engines * SLOTS // 2)
    groups = engines * SLOTS // WORKLOADS["lognormal"].n_samples_per_prompt
    marks: list[tuple[float, float]] = []
    record = CLOCK.of(simulation.StepRecord.of)

    def marked(*args: Any) -> Any:
        made = record(*args)
        marks.append((time.process_time(), CLOCK.seconds))
        return made

    simulation.StepRecord.of = marked  # type: ignore[method-assign]
    simulation.simulate(
        dataclasses.replace(WORKLOADS["lognormal"], rollout_batch_size=groups // 2),
        roofline(GPUS["mi300x"], MODELS["qwen3-8b"], Roofline(slots=SLOTS)),
        replicas=engines,
        steps=steps,
        warm_up=0,
        over_sampling_batch_size=groups,
        resolution=0.25,
        engine_type=TimedEngine,
    )
    (began, others), (ended, others_then) = marks[FILLING - 1], marks[-1]
    counted = steps - FILLING
    return {
        "scheduler_seconds": (ended - began - others_then + others) / counted,
        "all_seconds": (ended - began) / counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--trees", type=Path, nargs="*", default=[Path(__file__).parents[2]], help="checkouts")
    parser.add_argument("--collector", choices=("off", "april", "python"), default="off")
    parser.add_argument("--once", action="store_true", help="measure once, and print it")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(measure(args.engines, args.steps, args.collector)))
        return
    arms = [*((tree, "off") for tree in args.trees), (args.trees[-1], "april"), (args.trees[-1], "python")]
    found: list[list[dict[str, float]]] = [[] for _ in arms]
    for _ in range(args.runs):
        for (tree, collector), results in zip(arms, found, strict=True):
            sizes = ["--engines", str(args.engines), "--steps", str(args.steps), "--collector", collector]
            command = [sys.executable, __file__, "--once", *sizes]
            environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
            said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(said))
            print(tree.name, collector, results[-1], flush=True)
    measured = {"samples_under_way": args.engines * SLOTS, "steps_counted": args.steps - FILLING}
    rows = [{name: spread([run[name] for run in results]) for name in results[0]} for results in found]
    sys.argv = [sys.argv[0], *(f"--runs={args.runs}",)]  # the names of checkouts have no meaning elsewhere
    trees = [*("before" if len(args.trees) == 2 else str(i) for i in range(len(args.trees) - 1)), "now"]
    order = [*trees, "now, garbage collected as april train does", "now, garbage collected as Python does"]
    print(save(__file__, {**measured, **dict(zip(order, rows, strict=True))}))


if __name__ == "__main__":
    main()
