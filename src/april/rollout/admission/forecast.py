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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april.rollout.admission.rates import EngineRates, Work, tokens_above_half
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
        groups, started = _Groups.none(self.lengths.shape[1]), 0
        seconds = staleness = sampled = 0.0
        for version in range(steps):
            new = np.arange(started, started + max(target - len(groups.left), 0)) % len(self.lengths)
            started += len(new)
            groups.start(self.dilation * self.lengths[new])
            step = self._simulate_step(groups, version)
            groups.begun = groups.begun_before(step.end, groups.starts(step.intervals), version)
            left = groups.left_after(step)
            if version >= skip:
                work = self._work(groups, step)
                fixed = self.update_seconds + self.interrupt_seconds * bool(left.any() and step.end > 0)
                seconds += max(self.rates.seconds(*work), self.training_seconds) + fixed
                staleness += float((version - groups.begun[step.trained]).mean())
                sampled += work.sampled
            groups.left = left
            groups.keep(~step.trained)
        rate = min(sampled / max(seconds, 1e-12), self._trainer_rate)
        return Forecast(target, rate, staleness / max(steps - skip, 1))

    @property
    def dilation(self) -> float:
        """Factor by which waits for environments extend responses, and by which more samples share the slots."""
        return 1 + self.away

    def _simulate_step(self, groups: _Groups, version: int) -> _Step:
        """Return the intervals of unfinished samples, the end of the step, and the groups that it trains on."""
        work = groups.left[groups.unfinished]
        slots = int(self.dilation * self.slots)
        step = self._step(groups, SlotIntervals.uninterrupted(slot_starts(work, slots), work), version)
        if self.kv_tokens is None:
            return step
        # Of the samples that share the slots, only those that decode hold KV cache in the engine.
        held = groups.done + self.dilation * self.prompt_tokens
        room = self.kv_tokens * self.dilation**2
        if step.intervals.peak(held, step.end) <= room:
            return step
        # Preemption delays the end by an unknown time, so the simulation is extended until the end is in it.
        extended = with_preemption(held, work, slots, room, EXTENSION * step.end)
        return next(step for one in extended if (step := self._step(groups, one, version)).end < inf)

    def _step(self, groups: _Groups, intervals: SlotIntervals, version: int) -> _Step:
        """Return the step in which unfinished samples have these intervals; its end is inf if they are too short."""
        complete = groups.scatter(intervals.complete(groups.left[groups.unfinished]), finished=0.0).max(1)
        end, trained = self._end(groups, complete, groups.starts(intervals), version)
        return _Step(intervals, end, trained)

    def _work(self, groups: _Groups, step: _Step) -> Work:
        """Return the work of the engine in a step."""
        intervals, sample, gained = step.intervals, step.intervals.sample, step.gained
        before, tokens, ran = groups.done / self.dilation, gained / self.dilation, gained > 0
        context = self.prompt_tokens + before[sample] + intervals.had / self.dilation
        # `SlotIntervals` has the first interval of each sample in front; every later one follows a preemption.
        first = ran & (np.arange(len(sample)) < len(before))
        new = first & (before[sample] == 0)
        start, end = np.minimum(intervals.start, step.end), np.array([step.end])
        above_half = tokens_above_half(start, start + gained, self.dilation * self.slots, end)
        return Work(
            decode_steps=step.end,
            sampled=tokens.sum(),
            above_half=above_half[0] / self.dilation,
            read=float(tokens @ (context + tokens / 2)),
            prompt=new.sum() * self.prompt_tokens,
            resumed=context[first & ~new].sum(),
            preempted=context[ran & ~first].sum(),
        )

    @property
    def _trainer_rate(self) -> float:
        """Tokens/s that the trainer can consume: tokens sampled beyond this rate wait and become stale."""
        if not self.training_seconds:
            return inf
        tokens: float = self.batch_size * self.lengths.shape[1] * float(self.lengths.mean())
        return tokens / (self.training_seconds + self.update_seconds)

    def _end(self, groups: _Groups, complete: Floats, starts: Floats, version: int) -> tuple[float, NDArray[np.bool_]]:
        """Return the end of the step, in decode steps from its start, and the groups that it trains on
        (`staleness.select`); the end is inf if too few groups complete in the simulated time."""
        trained = np.zeros(len(complete), dtype=bool)
        ends = np.sort(complete)[self.batch_size - 1 :]
        for end in np.unique(ends[ends < inf]).tolist():
            begun = groups.begun_before(end, starts, version)
            ready = np.flatnonzero(complete <= end)
            oldest = ready[np.argsort(begun[ready], kind="stable")][: self.batch_size]
            trained = np.zeros(len(complete), dtype=bool)
            trained[oldest] = True
            if self.max_staleness is None:
                return end, trained
            rest = np.sort(begun[~trained & (begun != NOT_BEGUN)])
            # `staleness.feasible` at the next version, for all groups in the order of their deadlines.
            due = self.batch_size * (rest + self.max_staleness - version)
            if (np.arange(len(rest)) < due).all():
                return end, trained
        return inf, trained


class _Step(NamedTuple):
    """A simulated step."""

    intervals: SlotIntervals
    end: float
    """Decode steps from the start of the step."""
    trained: NDArray[np.bool_]
    """The groups that the step trains on, shape [groups]."""

    @property
    def gained(self) -> Floats:
        """Decode steps of each interval within the step."""
        return np.maximum(np.minimum(self.intervals.stop, self.end) - self.intervals.start, 0.0)


@dataclass(slots=True)
class _Groups:
    """Groups in flight, in the order of their start."""

    left: Floats
    """Decode steps that each sample still needs, shape [groups, samples]; 0 for a finished sample."""
    total: Floats
    """Decode steps that each sample needs in total."""
    begun: NDArray[np.int64]
    """Version that sampled the first token of each group, shape [groups], or `NOT_BEGUN`."""

    @classmethod
    def none(cls, group_size: int) -> _Groups:
        return cls(np.zeros((0, group_size)), np.zeros((0, group_size)), np.zeros(0, dtype=np.int64))

    def start(self, lengths: Floats) -> None:
        """Add new groups, whose samples need `lengths` decode steps."""
        self.left = np.concatenate((self.left, lengths))
        self.total = np.concatenate((self.total, lengths))
        self.begun = np.concatenate((self.begun, np.full(len(lengths), NOT_BEGUN)))

    def keep(self, kept: NDArray[np.bool_]) -> None:
        self.left, self.total, self.begun = self.left[kept], self.total[kept], self.begun[kept]

    @property
    def unfinished(self) -> NDArray[np.bool_]:
        """The samples that `SlotIntervals` are about, shape [groups, samples]."""
        return self.left > 0

    @property
    def done(self) -> Floats:
        """Decode steps that each unfinished sample has had, shape [unfinished samples]."""
        return (self.total - self.left)[self.unfinished]

    def scatter(self, values: Floats, finished: float) -> Floats:
        """Return one value for each sample, shape [groups, samples]: `values` for the unfinished ones."""
        scattered = np.full_like(self.left, finished)
        scattered[self.unfinished] = values
        return scattered

    def starts(self, intervals: SlotIntervals) -> Floats:
        """Return when each group's first unfinished sample gets a slot, shape [groups]; inf for never."""
        first = intervals.start[: np.count_nonzero(self.left)]
        starts: Floats = self.scatter(first, finished=inf).min(1)
        return starts

    def begun_before(self, end: float, starts: Floats, version: int) -> NDArray[np.int64]:
        """Return `begun` at the time `end` of a step of this version."""
        return np.where((self.begun == NOT_BEGUN) & (starts < end), version, self.begun)

    def left_after(self, step: _Step) -> Floats:
        """Return `left` at the end of a step."""
        progress = np.bincount(step.intervals.sample, step.gained, np.count_nonzero(self.left)).astype(float)
        left = self.left - self.scatter(progress, finished=0.0)
        return np.where(left > 1e-6, left, 0.0)  # sums of several intervals have rounding errors
