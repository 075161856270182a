"""Totals of a run so far: each metric aggregated over the steps by the table of metrics.

Invariant: the totals are a fold over the run's records in order. Totals restored from a checkpoint and continued are
equal to the totals of an uninterrupted run and of `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from april.reporting.metrics import LAST, MAX, RATES, SUM, Metric, is_number, metric


class Totals:
    """Aggregates records; `get` and `values` return the totals."""

    def __init__(self, sums: Mapping[str, list[float]] | None = None) -> None:
        self._sums = {name: list(entry) for name, entry in (sums or {}).items()}
        """By metric: its value, and for a mean the weight by which that is divided."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        totals = cls()
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a record; only its numbers count."""
        for name, value in record.items():
            if is_number(value) and name != "step" and not metric(name).amount:
                self._count(metric(name), value, record)
        for rate, dividend, divisor in RATES:
            amount, weight = record.get(dividend), record.get(divisor)
            if is_number(amount) and is_number(weight):
                self._add(rate, amount, weight)

    def _count(self, own: Metric, value: float, record: Mapping[str, Any]) -> None:
        entry = self._sums.get(own.name)
        if own.over is LAST or (own.over is MAX and entry is None):
            self._sums[own.name] = [value]
        elif own.over is MAX:
            entry[0] = max(entry[0], value)  # type: ignore[index]
        elif own.over is SUM:
            self._sums[own.name] = [value + (entry[0] if entry else 0)]
        else:
            weight = record.get(own.weight, 1) if own.weight else 1
            if is_number(weight):
                self._add(own.name, value * weight, weight)

    def _add(self, name: str, amount: float, weight: float) -> None:
        before, weights = self._sums.get(name) or (0, 0)
        self._sums[name] = [before + amount, weights + weight]

    def get(self, name: str) -> float | None:
        """Return the total of a metric; None if it was never measured."""
        return _value(self._sums[name]) if name in self._sums else None

    def values(self) -> dict[str, float]:
        """Return the total of every metric."""
        return {name: _value(entry) for name, entry in self._sums.items()}

    def state_dict(self) -> dict[str, list[float]]:
        return {name: list(entry) for name, entry in self._sums.items()}


def _value(entry: list[float]) -> float:
    value, *weight = entry
    return value / weight[0] if weight and weight[0] else value
