"""A short feedback controller of N' against the forecaster, 2 N and the best fixed N'; see docs/reports/controller.md.

Each case is a workload, an engine and a seed; each arm runs over the same prompts and lengths. Time is virtual, so that
neither the machine nor the order of the arms changes a figure. Runs that are in the file are not repeated.

    OMP_NUM_THREADS=1 python benchmarks/simulation/simple_admission.py --set development
    OMP_NUM_THREADS=1 python benchmarks/simulation/simple_admission.py --set unseen --arms fixed forecaster
    OMP_NUM_THREADS=1 python benchmarks/simulation/simple_admission.py --set unseen --arms controller
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from arms import BOUND, COST
from controller import Controller
from overlap import COST as OVERLAP_COST
from overlap import WORKLOAD as OVERLAP_WORKLOAD
from random_workloads import Case as RandomCase

from april.simulation.cost_model import CostModel
from april.simulation.engine import SimulatedEngine
from april.simulation.hardware import GPUS, MODELS, Roofline, roofline
from april.simulation.run import simulate
from april.simulation.turns import Turns
from april.simulation.workload import WORKLOADS, Part, Workload

FIXED = (1.25, 2, 3, 4, 6)
"""Ratios N'/N of the fixed arms, as far as the bound allows; the largest that the bound allows is always one."""
FEW_FIXED = (2, 3)
"""The same on random workloads and 64 engines."""
EPISODES = Workload("episodes", (Part(600, 0.9),), 4096, rollout_batch_size=16, n_samples_per_prompt=4)
TURNS = {"quick tools": Turns(150, 40, 0.5, 0.5), "slow tools": Turns(150, 40, 8.0, 1.2)}
CONTROLLERS = {"controller": {}, "below": {"try_below": True}, "scan": {"try_below": True, "scan": True}}
"""The controller of the protocol, and its two revisions."""
SPEED_SIGMA, SPEED_MEMORY, SLOW_SHARE, SLOW = 0.25, 0.7, 0.1, 2.0


class NoisyEngine(SimulatedEngine):
    """An engine on a shared machine: every cost changes with each weight update.

    The logarithm of the speed is an autoregressive process (standard deviation 0.25, correlation of successive steps
    0.7). In addition, one step in ten is slower by a factor of two.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._usual = self.cost
        self._rng = np.random.default_rng(self.workload.seed)  # type: ignore[attr-defined]
        self._log_speed = 0.0

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await super().update_weights(version, weights)
        fresh = SPEED_SIGMA * (1 - SPEED_MEMORY**2) ** 0.5 * self._rng.standard_normal()
        self._log_speed = SPEED_MEMORY * self._log_speed + fresh
        factor = float(np.exp(-self._log_speed)) * (SLOW if self._rng.random() < SLOW_SHARE else 1.0)
        self.cost = self.replicas.cost = scaled(self._usual, factor)
        self.replicas._base = self.cost.base()


def scaled(cost: CostModel, factor: float) -> CostModel:
    names = ("kv_token_seconds", "prefill_token_seconds", "prefill_pair_seconds", "update_seconds", "interrupt_seconds")
    each = {name: factor * getattr(cost, name) for name in names}
    return dataclasses.replace(cost, decode_seconds=tuple(factor * s for s in cost.decode_seconds), **each)


@dataclass(frozen=True)
class Case:
    """What all arms of a comparison share."""

    name: str
    workload: Workload
    cost: CostModel
    steps: int
    warm_up: int
    ratios: tuple[float, ...] = FIXED
    bound: int = BOUND
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def fixed(self) -> list[int]:
        size = self.workload.rollout_batch_size
        ratios = {ratio for ratio in self.ratios if ratio <= self.bound + 1} | {self.bound + 1}
        return sorted({round(ratio * size) for ratio in ratios})

    def run(self, target: Any) -> dict[str, Any]:
        began = time.process_time()
        seed = self.workload.seed
        outcome = simulate(
            self.workload,
            self.cost,
            steps=self.steps,
            warm_up=self.warm_up,
            seed=seed,
            over_sampling_batch_size=target,
            max_staleness=self.bound,
            **{"resolution": 1.0, **self.settings},
        )
        return {
            "consumed_tokens_per_second": outcome.overall_tokens_per_second,
            "mean_staleness": outcome.mean_staleness,
            "max_staleness": outcome.max_staleness,
            "occupancy": outcome.occupancy,
            "targets": [step.target for step in outcome.steps],
            "tokens": [step.consumed_tokens for step in outcome.steps],
            "seconds": [round(s.seconds + s.update_seconds + s.training_seconds, 3) for s in outcome.steps],
            "processor_seconds": round(time.process_time() - began, 2),
        }


def named(seeds: dict[int, tuple[str, ...]], steps: int = 36, warm_up: int = 10) -> Iterator[Case]:
    for seed, policies in seeds.items():
        for on_update in policies:
            for name, workload in WORKLOADS.items():
                times = 3 if name == "small-batch" else 1
                yield Case(
                    f"named/{name}/{on_update}/{seed}",
                    dataclasses.replace(workload, seed=seed),
                    COST,
                    times * steps,
                    times * warm_up,
                    settings={"on_update": on_update},
                )


def random(seeds: list[int]) -> Iterator[Case]:
    for seed in seeds:
        drawn = RandomCase.draw(seed)
        settings = {"on_update": drawn.on_update, "resolution": drawn.resolution}
        yield Case(f"random/{seed}", drawn.workload, drawn.cost, 48, 16, FEW_FIXED, drawn.bound, settings)


def noisy(seeds: list[int]) -> Iterator[Case]:
    for seed in seeds:
        for name in ("light", "lognormal", "heavy", "bimodal", "truncated", "small-batch"):
            workload = dataclasses.replace(WORKLOADS[name], seed=seed)
            times = 3 if name == "small-batch" else 1
            settings = {"engine_type": NoisyEngine}
            yield Case(f"noisy/{name}/{seed}", workload, COST, 36 * times, 10 * times, settings=settings)


def overlapping(seeds: list[int]) -> Iterator[Case]:
    for seed in seeds:
        workload = dataclasses.replace(OVERLAP_WORKLOAD, seed=seed)
        for trainer, per_token in (("fast", 2e-5), ("slow", 1.5e-4)):
            for on_update in ("recompute", "keep"):
                settings = {"overlap": True, "train_token_seconds": per_token, "on_update": on_update, "replicas": 4}
                name = f"overlap/{trainer} trainer/{on_update}/{seed}"
                yield Case(name, workload, OVERLAP_COST, 36, 10, settings={**settings, "resolution": 0.0})


def episodes(seeds: list[int]) -> Iterator[Case]:
    for seed in seeds:
        workload = dataclasses.replace(EPISODES, seed=seed)
        for name, turns in TURNS.items():
            for on_update in ("recompute", "keep"):
                settings = {"turns": turns, "on_update": on_update, "resolution": 0.2}
                cost = dataclasses.replace(COST, slots=64)
                yield Case(f"episodes/{name}/{on_update}/{seed}", workload, cost, 24, 8, settings=settings)


def engines(seeds: list[int]) -> Iterator[Case]:
    for seed in seeds:
        workload = dataclasses.replace(WORKLOADS["lognormal"], rollout_batch_size=256, seed=seed)
        cost = roofline(GPUS["mi300x"], MODELS["qwen3-8b"], Roofline(slots=64))
        yield Case(f"64 engines/{seed}", workload, cost, 24, 8, (2, 2.5, 3), settings={"replicas": 64})


def drawn(first: int, end: int) -> list[int]:
    """Seeds in an order drawn at random: a study that is stopped has measured a fair sample of them."""
    return np.random.default_rng(0).permutation(np.arange(first, end)).tolist()


SETS: dict[str, Callable[[], list[Case]]] = {
    "development": lambda: [
        *named({1: ("recompute",)}),
        *overlapping([1]),
        *episodes([1]),
        *noisy([1]),
        *random(list(range(40))),
    ],
    "unseen": lambda: [
        *named({201: ("recompute",)}),
        *[case for case in noisy([201]) if case.name.split("/")[1] in ("lognormal", "bimodal", "small-batch")],
        *list(overlapping([201]))[::3],
        *random(drawn(1000, 1200)[:20]),
        *[case for case in named({201: ("keep",)}) if case.name.split("/")[1] in ("lognormal", "heavy", "small-batch")],
        *list(episodes([201]))[::3],
        *engines([201]),
        *random(drawn(1000, 1200)[20:]),
    ],
}


def arms_of(case: Case, wanted: list[str]) -> dict[str, Any]:
    arms: dict[str, Any] = {str(target): target for target in case.fixed} if "fixed" in wanted else {}
    if "forecaster" in wanted:
        arms["forecaster"] = "auto"
    for arm, revision in CONTROLLERS.items():
        if arm in wanted:
            arms[arm] = Controller(case.bound, **revision)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), required=True)
    parser.add_argument("--arms", nargs="+", default=["fixed", "forecaster", "controller"])
    parser.add_argument("--only", default="", help="cases whose name begins with this")
    parser.add_argument("--again", action="store_true", help="repeat runs that are in the file")
    options = parser.parse_args()
    path = Path(__file__).with_name(f"{Path(__file__).stem}_{options.set}.json")
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    for case in SETS[options.set]():
        if not case.name.startswith(options.only):
            continue
        runs = results.setdefault(case.name, {"N": case.workload.rollout_batch_size, "warm_up": case.warm_up})
        for arm, target in arms_of(case, options.arms).items():
            if arm not in runs or options.again:
                runs[arm] = case.run(target)
        document = {"command": " ".join(["python", f"benchmarks/simulation/{Path(__file__).name}", *sys.argv[1:]])}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({**document, "results": results}) + "\n")
        fresh.rename(path)
        print(case.name, flush=True)


if __name__ == "__main__":
    main()
