"""The second accuracy study: remedies for staleness, at chosen learning rates. `protocol.md` says what is run and why;
a JSON line in `remedies.jsonl` for each run as it ends.

Invariants: those of `study.py`, and
- the order of the runs is the protocol's; a stage whose runs depend on others begins when those have ended;
- a run's arm is nothing but settings of a recipe.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/remedies.py --runs 3
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from analysis import final_accuracy
from study import HERE, recorded, run_cells

from april.config.checking import check_recipe
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.rollout.step import Step
from april.training.local import LocalLearner

RATES = (2e-5, 3.5e-5, 6e-5, 1e-4, 1.7e-4, 3e-4, 5e-4, 9e-4)
FIRST_RATES = slice(3, 6)
"""Of `RATES`: those that are tried in any case."""
EQUAL = 0.01
"""Rates whose mean final accuracy is this close to the highest are equally good; the lowest of them is the best."""
HIGH = 3
"""The high rate, in best rates of the synchronous arm."""

ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"rollout.partial_rollout": False, "rollout.over_sampling_batch_size": 8},
    "partial": {},
    "first-synchronous": {"rollout.ramp_steps": 1},
    "ramp": {"rollout.ramp_steps": 4},
    "window": {"rollout.admission_window": 8},
    "ess": {"training.ess_learning_rate": True},
    "dppo": {"algorithm.correction": "dppo"},
    "opsm": {"algorithm.correction": "opsm"},
    "a3po": {"algorithm.correction": "a3po"},
}
"""What each arm sets in a recipe of partial rollouts at N' = 2 N."""

LOGGED = (
    "reward",
    "reward_std",
    "response_length_mean",
    "staleness_mean",
    "off_policy_token_share",
    "grad_norm",
    "clip_fraction",
    "masked_fraction",
    "kl_behaviour",
    "ratio_max",
    "ess",
    "entropy",
    "lr",
    "first_moment",
    "agreement",
)
"""Of each step, in `by_step`."""

SELECT, PAIRED = range(200, 203), range(300, 308)
"""Seeds."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of the study.

    Args:
        rate: the peak learning rate.
    """

    stage: str
    task: str
    algorithm: str
    arm: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return "-".join(map(str, (self.task, self.algorithm, self.arm, self.rate, self.seed)))

    def recipe(self, output: Path) -> Recipe:
        recipe = load_recipe(HERE / f"{self.task}.toml")
        recipe.algorithm.algorithm = self.algorithm
        recipe.training.seed, recipe.training.learning_rate = self.seed, self.rate
        recipe.training.eval_samples = 2
        recipe.reporting.output = str(output)
        for name, value in ARMS[self.arm].items():
            section, setting = name.split(".")
            assert hasattr(getattr(recipe, section), setting), f"there is no {name}"
            setattr(getattr(recipe, section), setting, value)
        check_recipe(recipe)
        return recipe

    def more(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What is kept of each step, beside what `study.measured` keeps of the whole."""
        return {"by_step": {name: [float(f"{step[name]:.4g}") for step in steps] for name in LOGGED}}


def factors(stage: str, arm: str, rate: float, seed: int) -> Run:
    return Run(stage, "factors", "grpo", arm, rate, seed)


def tried(arm: str, records: Sequence[Record]) -> dict[float, list[float]]:
    """Final accuracies of an arm's selection runs by rate, of the rates that all seeds have been run at."""
    found: dict[float, list[float]] = {}
    for record in records:
        if (record["stage"], record["arm"]) == ("select", arm):
            found.setdefault(record["rate"], []).append(final_accuracy(record))
    return {rate: values for rate, values in sorted(found.items()) if len(values) == len(SELECT)}


def candidates(arm: str, records: Sequence[Record]) -> tuple[list[float], float | None]:
    """The rates to try by what is known, and the best of them if all have been tried."""
    known, rates = tried(arm, records), list(RATES[FIRST_RATES])
    while all(rate in known for rate in rates):
        means = {rate: float(np.mean(known[rate])) for rate in rates}
        best = min(rate for rate in rates if means[rate] >= max(means.values()) - EQUAL)
        place = RATES.index(best)
        beyond = place - 1 if best == rates[0] else place + 1
        if rates[0] < best < rates[-1] or not 0 <= beyond < len(RATES):
            return rates, best
        rates = sorted({*rates, RATES[beyond]})
    return rates, None


def planned(records: Sequence[Record]) -> Iterator[Run]:
    """The protocol's runs in its order, as far as they follow from what has ended."""
    tries = {arm: candidates(arm, records) for arm in ("synchronous", "partial")}
    best = {arm: chosen for arm, (_, chosen) in tries.items()}
    for seed in SELECT:
        yield from (factors("select", arm, rate, seed) for arm, (rates, _) in tries.items() for rate in rates)
    synchronous, partial = best["synchronous"], best["partial"]
    if synchronous is None or partial is None:
        return
    high = round(HIGH * synchronous, 7)
    remedies = [arm for arm in ARMS if arm not in best]
    for seed in PAIRED:
        yield from (factors("pair", arm, rate, seed) for arm, rate in best.items() if rate)
        yield from (factors("pair", arm, high, seed) for arm in best)
    yield from (factors("high", arm, high, seed) for seed in PAIRED for arm in remedies)
    yield from (factors("best", arm, partial, seed) for seed in PAIRED for arm in remedies)


def observe_moments() -> None:
    """Have every training step say what Adam's moments are after it."""
    train = LocalLearner.train

    def observed(self: LocalLearner, step: Step, number: int) -> dict[str, float]:
        metrics = train(self, step, number)
        squares, steps = 0.0, []
        for state in self.optimizer.state.values():
            beta1, beta2 = self.settings.betas
            first = state["exp_avg"] / (1 - beta1 ** state["step"])
            second = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
            squares += float(first.square().sum())
            steps.append((first.abs() / (second.sqrt() + 1e-8)).flatten())
        agreement = float(torch.cat(steps).mean()) if steps else 0.0
        return metrics | {"first_moment": squares**0.5, "agreement": agreement}

    LocalLearner.train = observed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "remedies.jsonl")
    parser.add_argument("--runs", type=int, help="run at most this many; all that are missing if not given")
    arguments = parser.parse_args()
    observe_moments()
    left = arguments.runs
    while left is None or left > 0:
        records = recorded(arguments.output)
        known = {record["key"] for record in records}
        missing = [run for run in dict.fromkeys(planned(records)) if run.key not in known]
        if not missing:
            break
        ended = run_cells(missing, arguments.output, 1)
        if not ended:
            time.sleep(10)  # others are at what is left, and more may follow from it
        left = None if left is None else left - ended


if __name__ == "__main__":
    main()
