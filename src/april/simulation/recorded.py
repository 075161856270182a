"""The response lengths of a recorded run, as a workload."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from april.reporting.metrics_log import read_metrics
from april.reporting.trace import read_trace
from april.rollout.admission.lengths import LengthModel
from april.simulation.turns import Turns
from april.simulation.workload import Workload

PROFILE = "profile.json"
"""Summary of `april profile`, which contains the turns of its episodes."""


@dataclass(frozen=True)
class Recorded:
    """Data of a run from which another run is simulated.

    Args:
        workload: response lengths, and their correlation within groups.
        truncated: share of the responses that the budget truncated, whose full length is unknown.
        train_token_seconds: training time for each consumed token; None if the run has no summary.
        turns: turns of episodes; None if the run had no environment.
    """

    workload: Workload
    truncated: float
    train_token_seconds: float | None
    turns: Turns | None = None


def read_recorded(run: Path) -> Recorded:
    """Read the responses of all steps of the run in the directory `run`.

    Raises:
        ValueError: the directory contains no run, or no step was recorded.
    """
    try:
        rollout = json.loads((run / "recipe.json").read_text())["rollout"]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{run}: no recipe.json of a run in this directory; name the directory of a run") from None
    steps = list(read_trace(run))
    if not steps:
        raise ValueError(f"{run}: no step was recorded in trace.jsonl")
    size, budget = rollout["n_samples_per_prompt"], rollout["max_response_length"]
    lengths = np.concatenate([step["lengths"] for step in steps]).reshape(-1, size)
    workload = Workload(
        str(run),
        observed=tuple(np.sort(lengths, axis=None).tolist()),
        max_tokens=budget,
        correlation=_correlation(lengths, budget),
        rollout_batch_size=rollout["rollout_batch_size"],
        n_samples_per_prompt=size,
    )
    truncated = float(np.concatenate([step["truncated"] for step in steps]).mean())
    return Recorded(workload, truncated, _training(run), _turns(run, size))


def _correlation(lengths: np.ndarray, budget: int) -> float:
    model = LengthModel(budget, half_life=math.inf)
    # No half-life: every recorded response has the same weight.
    model.observe(np.zeros(lengths.size), lengths.ravel(), np.ones(lengths.size, bool))
    model.observe_groups(lengths)
    return model.correlation


def _training(run: Path) -> float | None:
    try:
        summary = json.loads((run / "summary.json").read_text())
        return float(summary["train_seconds"] / summary["consumed_tokens"])
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        return None


def _turns(run: Path, size: int) -> Turns | None:
    """Return turns with the run's mean lengths and answer times; only a profile records the spread of these times."""
    if (profile := run / PROFILE).exists():
        turns = json.loads(profile.read_text()).get("turns")
        return turns and Turns(**turns)
    try:
        steps = [record for record in read_metrics(run) if record.get("turns_mean")]
    except FileNotFoundError:
        return None
    if not steps:
        return None

    def total(name: str, by: str = "") -> float:
        return float(sum(record[name] * record.get(by, 1) for record in steps))

    turns = total("turns_mean", "groups_consumed")  # of one sample of each group
    tokens, observed = total("step_consumed_tokens") / size, total("step_environment_tokens") / size
    return Turns(
        max(tokens / turns, 1.0), round(observed / turns), total("environment_seconds", "groups_consumed") / turns
    )
