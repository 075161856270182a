"""The second accuracy study: remedies for staleness, at chosen learning rates. `protocol.md` lists the runs and
their reasons; each run adds a JSON line to `remedies.jsonl` when it ends.

Invariants: as in `study.py`, and
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
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from analysis import final_accuracy
from comparison import Runs, mean_accuracy, runs_of, winner
from study import HERE, recorded, run_cells

from april.config.checking import check_recipe
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.rollout.batch import RolloutBatch
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
    "ess": {},
    "dppo": {"algorithm.correction": "dppo"},
    "opsm": {"algorithm.correction": "opsm"},
    "a3po": {},
}
"""What each arm sets in a recipe of partial rollouts at N' = 2 N."""
REMOVED = ("ess", "a3po")
"""Arms whose settings april no longer has: their recorded runs are analysed, and none are made."""

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

SELECT, OWN_RATE, PAIRED, CONFIRMED = range(200, 203), range(203, 206), range(300, 308), range(400, 408)
"""Seeds."""

BASELINES = ("synchronous", "partial")
OF_TRAINING = ("ess", "dppo", "opsm")
OF_THE_SCHEDULER = ("first-synchronous", "ramp", "window")
CHEAPEST_FIRST = (*OF_TRAINING, *OF_THE_SCHEDULER)
"""The remedies that may win: of more than six, eight pairs could not show anything after Holm's correction."""
TASK_RATE = {"factors": 1.0, "gcd": 1.0, "primes": 0.5}
"""A task's best rate, in units of the best rate of `factors`."""

Record = Mapping[str, Any]


def settings_of(arm: str, arms: Mapping[str, dict[str, Any]] = ARMS) -> dict[str, Any]:
    """What an arm sets; `a+b` is both together."""
    return {name: value for part in arm.split("+") for name, value in arms[part].items()}


def known_arms(records: Sequence[Record]) -> list[str]:
    """Every arm, including the combinations of two remedies that have been run."""
    return list(dict.fromkeys([*ARMS, *(record["arm"] for record in records)]))


class Rates(NamedTuple):
    """The best rate of each baseline, and the high rate."""

    synchronous: float
    partial: float
    high: float


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

    arms: ClassVar[Mapping[str, dict[str, Any]]] = ARMS

    @property
    def key(self) -> str:
        return "-".join(map(str, (self.task, self.algorithm, self.arm, self.rate, self.seed)))

    @property
    def repeatable(self) -> bool:
        """Whether april still has the settings of the arm."""
        return not set(self.arm.split("+")) & set(REMOVED)

    def recipe(self, output: Path) -> Recipe:
        recipe = load_recipe(HERE / f"{self.task}.toml")
        recipe.algorithm.algorithm = self.algorithm
        recipe.training.seed, recipe.training.learning_rate = self.seed, self.rate
        recipe.training.eval_samples = 2
        recipe.reporting.output = str(output)
        for name, value in settings_of(self.arm, self.arms).items():
            section, setting = name.split(".")
            assert hasattr(getattr(recipe, section), setting), f"there is no {name}"
            setattr(getattr(recipe, section), setting, value)
        check_recipe(recipe)
        return recipe

    def more(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Metrics kept of each step, in addition to `study.measured`'s figures of the whole run."""
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
    """The rates to try next, and the best rate if all have been tried."""
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


def rates_of(records: Sequence[Record]) -> Rates | None:
    """None while the best rates are not known."""
    synchronous, partial = (candidates(arm, records)[1] for arm in BASELINES)
    if synchronous is None or partial is None:
        return None
    return Rates(synchronous, partial, round(HIGH * synchronous, 7))


def planned(records: Sequence[Record]) -> Iterator[Run]:
    """The protocol's runs in its order, as far as they follow from the runs that have ended."""
    for seed in SELECT:
        for arm in BASELINES:
            yield from (factors("select", arm, rate, seed) for rate in candidates(arm, records)[0])
    rates = rates_of(records)
    if rates is None:
        return
    for seed in PAIRED:
        yield factors("pair", "synchronous", rates.synchronous, seed)
        yield factors("pair", "partial", rates.partial, seed)
        yield from (factors("pair", arm, rates.high, seed) for arm in BASELINES)
    for stage, rate in (("high", rates.high), ("best", rates.partial)):
        yield from (factors(stage, arm, rate, seed) for seed in PAIRED for arm in ARMS if arm not in BASELINES)
    high, best = (
        {arm: runs_of(records, PAIRED, arm=arm, rate=rate) for arm in ARMS if arm != "synchronous"}
        for rate in (rates.high, rates.partial)
    )
    if min(len(runs) for of in (high, best) for runs in of.values()) == len(PAIRED):
        yield from _two(high, rates)
        yield from _own_rate(rates)
        yield from _confirm(winner(high, best, CHEAPEST_FIRST), rates)


def _two(high: Mapping[str, Runs], rates: Rates) -> Iterator[Run]:
    """The two best remedies together, and synchronous runs at the rate that `ess` had."""
    chosen = [max(of, key=lambda arm: mean_accuracy(high[arm])) for of in (OF_THE_SCHEDULER, OF_TRAINING)]
    both = "+".join(chosen)
    if all(mean_accuracy(high[arm]) > mean_accuracy(high["partial"]) for arm in chosen):
        yield from (factors("two", both, rate, seed) for seed in PAIRED for rate in (rates.high, rates.partial))
    scale = float(np.mean([np.sqrt(run["by_step"]["ess"]) for run in high["ess"].values()]))
    yield from (factors("two", "synchronous", float(f"{scale * rates.high:.2g}"), seed) for seed in PAIRED)


def _own_rate(rates: Rates) -> Iterator[Run]:
    tried = [float(f"{rates.partial * factor:.2g}") for factor in (1 / 3, 1, 3)]
    yield from (factors("own-rate", arm, rate, seed) for seed in OWN_RATE for arm in OF_TRAINING for rate in tried)


def own_rates(records: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    """Final accuracies of each remedy of training at the rates it was tried at."""
    own = [record for record in records if record["stage"] == "own-rate"]
    return {
        arm: {
            f"{rate:g}": [round(final_accuracy(r), 4) for r in own if (r["arm"], r["rate"]) == (arm, rate)]
            for rate in sorted({r["rate"] for r in own if r["arm"] == arm})
        }
        for arm in OF_TRAINING
    }


def _confirm(won: str | None, rates: Rates) -> Iterator[Run]:
    for seed in CONFIRMED:
        for task, scale in TASK_RATE.items():
            for algorithm in ("grpo", "dapo", "gspo"):
                for arm in (*BASELINES, *((won,) if won else ())):
                    best = rates.synchronous if arm == "synchronous" else rates.partial
                    yield Run("confirm", task, algorithm, arm, float(f"{scale * best:.2g}"), seed)


def observe_moments() -> None:
    """Have every training step record Adam's moments after it."""
    train = LocalLearner.train

    def observed(self: LocalLearner, step: RolloutBatch, number: int) -> dict[str, float]:
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
        missing = [run for run in dict.fromkeys(planned(records)) if run.key not in known and run.repeatable]
        if not missing:
            break
        ended = run_cells(missing, arguments.output, 1)
        if not ended:
            time.sleep(10)  # other processes work on the remaining runs, and more runs may follow from these
        left = None if left is None else left - ended


if __name__ == "__main__":
    main()
