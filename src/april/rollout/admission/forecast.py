"""Forecast of throughput and staleness in the long run, for a given number of groups in flight.

Time is measured in decode steps: all samples that decode together advance by one token at a time, so the order of
events in a step depends on lengths and slots alone; durations follow from the costs of the work (`rates.py`). Steps are
simulated as the scheduler runs them: groups are started until N' are in flight, samples get slots oldest first and are
preempted if the KV cache is full (`slot_intervals.py`), and a step ends as soon as N groups are complete and the others
can still be trained on within the staleness bound.

An episode's sample is away while its environment answers, and another sample decodes in its slot. Waits are assumed to
be spread over the response in proportion to its tokens: with `away` decode steps of waiting per decode step of its own,
a sample takes 1 + away times longer, and 1 + away times more samples share the slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.admission.rates import EngineRates, crowded_tokens
from april.rollout.admission.slot_intervals import EXTENSION, Floats, SlotIntervals, slot_starts, with_preemption

NOT_BEGUN = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Forecast:
    """Means over simulated steps. Sampled tokens are counted as consumed tokens: in the long run both are the same, and
    over a few steps sampled tokens vary less."""

    target: int
    consumed_tokens_per_second: float
    staleness: float

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Forecast:
        """Return a saved forecast; older versions saved more fields."""
        return cls(*(saved[field.name] for field in fields(cls)))

    def towards(self, newest: Forecast, weight: float) -> Forecast:
        """Return the weighted mean of both, with `weight` for `newest`."""

        def mean(before: float, now: float) -> float:
            return before + weight * (now - before)

        return Forecast(
            self.target,
            mean(self.consumed_tokens_per_second, newest.consumed_tokens_per_second),
            mean(self.staleness, newest.staleness),
        )


@dataclass(frozen=True, slots=True)
class Conditions:
    """Inputs that all forecasts of one decision share.

    Args:
        lengths: response lengths of the groups in the order of their start, shape [groups, samples], used cyclically.
        batch_size: groups that a step trains on (N).
        slots: samples that decode together.
        kv_tokens: capacity of the KV cache, in tokens; None for no limit.
        max_staleness: staleness bound; None for no bound.
        prompt_tokens: mean length of a prompt.
        rates: costs of the engine's work.
        interrupt_seconds: time of an interrupt.
        update_seconds: time of a weight update.
        away: decode steps that an episode's sample waits for its environment, per decode step of its own.
        training_seconds: time of training that overlaps with generation, which is the shortest duration of a step for
            any N'; 0 without overlap, as N' then does not affect it.
    """

    lengths: Floats
    batch_size: int
    slots: int
    kv_tokens: float | None
    max_staleness: int | None
    prompt_tokens: float
    rates: EngineRates
    interrupt_seconds: float = 0.0
    update_seconds: float = 0.0
    training_seconds: float = 0.0
    away: float = 0.0

    def forecast(self, target: int, steps: int, skip: int) -> Forecast:
        """Simulate `steps` steps with `target` groups in flight, and average over all but the first `skip`."""
        group_size, stretch = self.lengths.shape[1], 1 + self.away
        lengths = stretch * self.lengths
        left = np.zeros((0, group_size))
        total = np.zeros((0, group_size))
        begun = np.zeros(0, dtype=np.int64)
        admitted = 0
        seconds = stale = sampled = 0.0
        for version in range(steps):
            new = np.arange(admitted, admitted + max(target - len(left), 0)) % len(lengths)
            admitted += len(new)
            left = np.concatenate((left, lengths[new]))
            total = np.concatenate((total, lengths[new]))
            begun = np.concatenate((begun, np.full(len(new), NOT_BEGUN)))
            intervals, end, chosen = self._play(left, total, begun, version)
            active = left > 0
            before, rows = (total - left)[active] / stretch, intervals.sample
            gained = np.maximum(np.minimum(intervals.stop, end) - intervals.start, 0.0)
            progress = np.bincount(rows, gained, len(before))
            starts = np.full_like(left, np.inf)
            starts[active] = intervals.start[: len(before)]
            still = left[active] - progress
            left[active] = np.where(still > 1e-6, still, 0.0)  # sums of several intervals have rounding errors
            begun[(begun == NOT_BEGUN) & (starts.min(1) < end)] = version
            if version >= skip:
                tokens, ran = gained / stretch, gained > 0
                context = self.prompt_tokens + before[rows] + intervals.had / stretch
                # `SlotIntervals` has the first interval of each sample in front; every later one follows a preemption.
                first = ran & (np.arange(len(rows)) < len(before))
                fresh = first & (before[rows] == 0)
                at = np.minimum(intervals.start, end)
                crowded = crowded_tokens(at, at + gained, stretch * self.slots, np.array([end]))
                generation = self.rates.seconds(
                    end,
                    tokens.sum(),
                    crowded[0] / stretch,
                    float(tokens @ (context + tokens / 2)),
                    fresh.sum() * self.prompt_tokens,
                    context[first & ~fresh].sum(),
                    context[ran & ~first].sum(),
                )
                fixed = self.update_seconds + self.interrupt_seconds * bool(left[active].any() and end > 0)
                seconds += max(generation, self.training_seconds) + fixed
                stale += float((version - begun[chosen]).mean())
                sampled += tokens.sum()
            left, total, begun = left[~chosen], total[~chosen], begun[~chosen]
        rate = min(sampled / max(seconds, 1e-12), self._trainer_rate)
        return Forecast(target, rate, stale / max(steps - skip, 1))

    def _play(
        self, left: Floats, total: Floats, begun: NDArray[np.int64], version: int
    ) -> tuple[SlotIntervals, float, NDArray[np.bool_]]:
        """Return the intervals of unfinished samples, the end of the step, and the groups that it trains on."""
        active, stretch = left > 0, 1 + self.away
        work, slots = left[active], int(stretch * self.slots)

        def over(intervals: SlotIntervals) -> tuple[float, NDArray[np.bool_]]:
            complete, starts = np.zeros_like(left), np.full_like(left, np.inf)
            complete[active] = intervals.complete(work)
            starts[active] = intervals.start[: len(work)]
            return self._end(complete.max(1), starts.min(1), begun, version)

        intervals = SlotIntervals.uninterrupted(slot_starts(work, slots), work)
        end, chosen = over(intervals)
        if self.kv_tokens is None:
            return intervals, end, chosen
        # Of the samples that share the slots, only those that decode hold KV cache in the engine.
        held, room = (total - left)[active] + stretch * self.prompt_tokens, self.kv_tokens * stretch**2
        if intervals.peak(held, end) <= room:
            return intervals, end, chosen
        # Preemption delays the end by an unknown time, so the simulation is extended until the end is in it.
        for intervals in with_preemption(held, work, slots, room, EXTENSION * end):
            end, chosen = over(intervals)
            if end < inf:
                break
        return intervals, end, chosen

    @property
    def _trainer_rate(self) -> float:
        """Tokens/s that the trainer can consume: tokens sampled beyond this rate wait and become stale."""
        if not self.training_seconds:
            return inf
        tokens: float = self.batch_size * self.lengths.shape[1] * float(self.lengths.mean())
        return tokens / (self.training_seconds + self.update_seconds)

    def _end(
        self, complete: Floats, starts: Floats, begun: NDArray[np.int64], version: int
    ) -> tuple[float, NDArray[np.bool_]]:
        """Return the end of the step, in decode steps from its start, and the groups that it trains on
        (`staleness.select`); the end is inf if too few groups complete in the simulated time."""
        chosen = np.zeros(len(complete), dtype=bool)
        ends = np.sort(complete)[self.batch_size - 1 :]
        for end in np.unique(ends[ends < inf]).tolist():
            first = np.where((begun == NOT_BEGUN) & (starts < end), version, begun)
            ready = np.flatnonzero(complete <= end)
            oldest = ready[np.argsort(first[ready], kind="stable")][: self.batch_size]
            chosen = np.zeros(len(complete), dtype=bool)
            chosen[oldest] = True
            if self.max_staleness is None:
                return end, chosen
            rest = np.sort(first[~chosen & (first != NOT_BEGUN)])
            # `staleness.feasible` at the next version, for all groups in the order of their deadlines.
            due = self.batch_size * (rest + self.max_staleness - version)
            if (np.arange(len(rest)) < due).all():
                return end, chosen
        return inf, chosen
