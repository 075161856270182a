"""What a step would bring in the long run, were so many groups kept under way.

A token is the unit of time: all samples that decode together advance by one token at a time, so what happens in a step,
and in which order, depends on lengths and slots alone; how long it takes follows from the cost of the work done
(`rates.py`). The steps are those of the scheduler: groups are begun until N' are under way, samples get slots oldest
first, and a step ends as soon as N groups are complete and the others can still be trained on within the bound.

An episode's sample is away while its environment answers, and another one decodes in its slot. Waits are taken to be
spread over the response in proportion to its tokens: with `away` decode steps of waiting for each that it decodes, a
sample takes 1 + away times as long, and as many more samples share the slots.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from april.rollout.admission.rates import EngineRates, crowded_tokens

Floats = NDArray[np.float64]

NOT_BEGUN = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Forecast:
    """The mean over the steps that were played through. Tokens sampled stand for tokens consumed: in the long run they
    are the same, and over a few steps they vary less."""

    target: int
    consumed_tokens_per_second: float
    staleness: float
    occupancy: float

    def towards(self, newest: Forecast, weight: float) -> Forecast:
        """The mean of both, of which `newest` makes up `weight`."""

        def mean(before: float, now: float) -> float:
            return before + weight * (now - before)

        return Forecast(
            self.target,
            mean(self.consumed_tokens_per_second, newest.consumed_tokens_per_second),
            mean(self.staleness, newest.staleness),
            mean(self.occupancy, newest.occupancy),
        )


@dataclass(frozen=True, slots=True)
class Conditions:
    """What every forecast of one decision shares.

    Args:
        lengths: response lengths of the groups in the order in which they are begun, shape [groups, samples]; after
            the last one it goes on with the first.
        batch_size: groups a step trains on (N).
        slots: samples that decode together.
        kv_tokens: tokens whose KV cache fits; None if that is no limit.
        max_staleness: the bound; None for no bound.
        prompt_tokens: mean length of a prompt.
        rates: what the engine's work costs.
        interrupt_seconds: what a step costs that interrupts something.
        update_seconds: what each weight update costs.
        away: decode steps that an episode's sample waits for its environment, for each one that it decodes.
        training_seconds: time of the trainer while the engine goes on: a step takes at least as long, whatever N'. 0
            where generation stands still meanwhile, for then no N' changes it.
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
        """Play `steps` steps with `target` groups under way, and average over all but the first `skip`."""
        group_size, stretch = self.lengths.shape[1], 1 + self.away
        lengths = stretch * self.lengths
        left = np.zeros((0, group_size))
        total = np.zeros((0, group_size))
        begun = np.zeros(0, dtype=np.int64)
        admitted, slots, resident = 0, float(self.slots), max(self.prompt_tokens, 1.0)
        seconds = stale = sampled = depth = 0.0
        for version in range(steps):
            new = np.arange(admitted, admitted + max(target - len(left), 0)) % len(lengths)
            admitted += len(new)
            left = np.concatenate((left, lengths[new]))
            total = np.concatenate((total, lengths[new]))
            begun = np.concatenate((begun, np.full(len(new), NOT_BEGUN)))
            if self.kv_tokens is not None:
                slots = min(self.slots, max(self.kv_tokens / resident, 1.0))
            active = left > 0
            work = left[active]
            start = queue(work, int(stretch * slots))
            complete = np.zeros_like(left)
            complete[active] = start + work
            starts = np.full_like(left, np.inf)
            starts[active] = start
            end, chosen = self._end(complete.max(1), starts.min(1), begun, version)
            progress = np.clip(end - start, 0.0, work)
            before, tokens = (total - left)[active] / stretch, progress / stretch
            ran = progress > 0
            resumed = ran & (before > 0)
            left[active] -= progress
            begun[(begun == NOT_BEGUN) & (starts.min(1) < end)] = version
            read = float(tokens @ (self.prompt_tokens + before + tokens / 2))
            resident = max(read / max(tokens.sum(), 1e-9), 1.0)
            if version >= skip:
                prompts = (ran & (before == 0)).sum() * self.prompt_tokens
                again = before[resumed].sum() + resumed.sum() * self.prompt_tokens
                crowded = crowded_tokens(start, start + progress, stretch * self.slots, np.array([end])) / stretch
                generation = self.rates.seconds(end, tokens.sum(), crowded[0], read, prompts, again)
                fixed = self.update_seconds + self.interrupt_seconds * bool((work > progress).any() and end > 0)
                seconds += max(generation, self.training_seconds) + fixed
                stale += float((version - begun[chosen]).mean())
                sampled, depth = sampled + tokens.sum(), depth + end
            left, total, begun = left[~chosen], total[~chosen], begun[~chosen]
        occupancy = sampled / max(depth * self.slots, 1e-9)
        rate = min(sampled / max(seconds, 1e-12), self._trainers_rate)
        return Forecast(target, rate, stale / max(steps - skip, 1), occupancy)

    @property
    def _trainers_rate(self) -> float:
        """Tokens/s that the trainer can take: what is sampled beyond them only waits, and gets stale."""
        if not self.training_seconds:
            return inf
        tokens: float = self.batch_size * self.lengths.shape[1] * float(self.lengths.mean())
        return tokens / (self.training_seconds + self.update_seconds)

    def _end(
        self, complete: Floats, starts: Floats, begun: NDArray[np.int64], version: int
    ) -> tuple[float, NDArray[np.bool_]]:
        """When the step ends, in tokens from its start, and which groups it trains on (`staleness.select`)."""
        order = np.argsort(complete, kind="stable")
        for last in range(self.batch_size - 1, len(order)):
            end = float(complete[order[last]])
            first = np.where((begun == NOT_BEGUN) & (starts < end), version, begun)
            ready = np.flatnonzero(complete <= end)
            oldest = ready[np.argsort(first[ready], kind="stable")][: self.batch_size]
            chosen = np.zeros(len(complete), dtype=bool)
            chosen[oldest] = True
            if self.max_staleness is None:
                break
            rest = np.sort(first[~chosen & (first != NOT_BEGUN)])
            due = self.batch_size * (rest + self.max_staleness - version)
            if (np.arange(len(rest)) < due).all():
                break
        return end, chosen


def queue(work: Floats, slots: int) -> Floats:
    """When each sample gets its slot, first come, first served."""
    start = np.zeros(len(work))
    if len(work) > slots:
        free = work[:slots].tolist()
        heapq.heapify(free)
        waiting = []
        for tokens in work[slots:].tolist():
            waiting.append(free[0])
            heapq.heapreplace(free, free[0] + tokens)
        start[slots:] = waiting
    return start
