"""Fitting a cost model to the measurements of a sweep, and the error of the fit.

- decoding: base(b) for each number b of samples that decode together, and the cost of a token in the KV cache;
- prefill: the cost of a token, of a pair of tokens, of a request;
- interrupts and weight updates: medians;
- serving: the factor by which a decode step takes longer in service than in the sweep (samples start and finish, and
  the scheduler processes every token), and the cost of a request. The proportions of the other terms are kept;
- held out: steps with partial rollouts, to which no constant is fitted. The error there is the error to expect.

The fit uses only times that are visible outside of the engine: seconds between submitting and receiving.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from april.rollout.engine import KVPolicy
from april.simulation.cost_model import CostModel
from april.simulation.run import simulate
from april.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Decoding:
    """`batch` samples decoded together while they held `kv_tokens` on average: seconds of a step."""

    batch: int
    kv_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts of `lengths` tokens, submitted together: seconds until each had its only token."""

    lengths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Serving:
    """Steps of a scheduler on a workload: seconds of all of them together, weight updates included."""

    workload: Workload
    steps: int
    settings: dict[str, Any]
    seconds: float

    def predicted(self, cost: CostModel, on_update: KVPolicy) -> float:
        """Return the seconds that the cost model predicts. Not to be called inside an event loop."""
        return simulate(
            self.workload, cost, steps=self.steps, warm_up=0, on_update=on_update, **self.settings
        ).rollout_seconds


Measured = TypeVar("Measured", Decoding, Prefill, Serving)


@dataclass(slots=True)
class Calibration:
    """Measurements of a sweep."""

    slots: int
    kv_tokens: int
    on_update: KVPolicy = "recompute"
    decoding: list[Decoding] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
    serving: list[Serving] = field(default_factory=list)
    held_out: list[Serving] = field(default_factory=list)
    interrupts: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    @classmethod
    def median(cls, sweeps: Sequence[Calibration]) -> Calibration:
        """Return the median of each measurement over equal sweeps."""
        first = sweeps[0]
        result = cls(first.slots, first.kv_tokens, first.on_update)
        for name in ("decoding", "prefill", "serving", "held_out"):
            setattr(result, name, [_median(runs) for runs in zip(*(getattr(s, name) for s in sweeps), strict=True)])
        for name in ("interrupts", "updates"):
            setattr(result, name, [second for sweep in sweeps for second in getattr(sweep, name)])
        return result

    def fit(self, source: str) -> CostModel:
        """Return the cost model nearest to the measurements, by relative least squares with no cost below zero.

        It simulates serving, and therefore cannot be called inside an event loop.
        """
        batches = sorted({m.batch for m in self.decoding})
        columns = np.zeros((len(self.decoding), len(batches) + 1))
        for row, m in zip(columns, self.decoding, strict=True):
            row[batches.index(m.batch)] = 1.0
            row[-1] = m.kv_tokens
        measured = np.array([m.seconds for m in self.decoding])
        *base, kv_seconds = _fit(columns, measured).tolist()
        decode_error = _error(columns @ np.array([*base, kv_seconds]), measured)

        rows = [(sum(m.lengths), sum(n * n for n in m.lengths), len(m.lengths), 1.0) for m in self.prefill]
        prefill = np.array(rows, dtype=float)
        waited = np.array([m.seconds for m in self.prefill])
        costs = _fit(prefill, waited)
        cost = CostModel(
            slots=self.slots,
            kv_tokens=self.kv_tokens,
            decode_batches=tuple(batches),
            # A cost model requires positive seconds; the fit may set one to 0.
            decode_seconds=tuple(max(seconds, 1e-9) for seconds in base),
            kv_token_seconds=kv_seconds,
            prefill_token_seconds=float(costs[0]),
            prefill_pair_seconds=float(costs[1]),
            request_seconds=float(costs[2]),
            update_seconds=statistics.median(self.updates) if self.updates else 0.0,
            interrupt_seconds=statistics.median(self.interrupts) if self.interrupts else 0.0,
            source=source,
            errors={"decode": decode_error, "prefill": _error(prefill @ costs, waited)},
        )
        cost = self._in_service(cost)
        for name, runs in (("serving", self.serving), ("held out", self.held_out)):
            if runs:
                predicted = np.array([run.predicted(cost, self.on_update) for run in runs])
                cost.errors[name] = _error(predicted, np.array([run.seconds for run in runs]))
        return cost

    def _in_service(self, cost: CostModel) -> CostModel:
        """Scale decode steps and requests to the times measured while serving.

        The order of an engine's work depends on the number of decode steps, not on their durations. So the seconds of a
        run are linear in each cost, and a simulation with one changed cost gives its coefficient.
        """
        if not self.serving:
            return cost
        free = replace(cost, request_seconds=0.0)
        # The factor 2 adds the decoding time of a run once: its difference is the coefficient.
        changes = (_slower(free, 2.0), replace(free, request_seconds=REQUEST))
        columns, rest = np.zeros((len(self.serving), 2)), np.zeros(len(self.serving))
        for i, run in enumerate(self.serving):
            without = run.predicted(free, self.on_update)
            columns[i] = [run.predicted(changed, self.on_update) - without for changed in changes]
            # Everything but decoding and requests.
            rest[i] = without - columns[i, 0]
        measured = np.array([run.seconds for run in self.serving])
        # Relative to all seconds of a run: the remainder alone may be close to 0.
        slowdown, requests = _fit(columns, np.maximum(measured - rest, 1e-9), measured).tolist()
        return replace(_slower(cost, max(slowdown, 1e-3)), request_seconds=requests * REQUEST)


REQUEST = 1e-3
"""Seconds added to the cost of a request to find its coefficient."""


def _slower(cost: CostModel, factor: float) -> CostModel:
    """Return the costs with decode steps that take `factor` times longer."""
    seconds = tuple(factor * seconds for seconds in cost.decode_seconds)
    return replace(cost, decode_seconds=seconds, kv_token_seconds=factor * cost.kv_token_seconds)


def _fit(
    columns: NDArray[np.float64], wanted: NDArray[np.float64], scale: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Minimise the squared error relative to `scale`, by default `wanted`, with coefficients of at least 0.

    Coefficients below 0 are removed one by one, the lowest first.
    """
    scale = wanted if scale is None else scale
    weighted, wanted = columns / scale[:, None], wanted / scale
    # Scaled for the condition number: columns that count tokens, their pairs and requests differ by magnitudes.
    largest = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    kept = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq((weighted / largest)[:, kept], wanted, rcond=None)[0]
        if not len(found) or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    result = np.zeros(columns.shape[1])
    result[kept] = found / largest[kept]
    return result


def _error(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(predicted / measured - 1)))


def _median(runs: Sequence[Measured]) -> Measured:
    ordered = sorted(runs, key=lambda run: run.seconds)
    return replace(ordered[len(ordered) // 2], seconds=statistics.median(run.seconds for run in runs))
