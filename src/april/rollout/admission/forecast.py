"""What a step would bring in the long run, were so many groups kept under way.

A token is the unit of time: all samples that decode together advance by one token at a time, so what happens in a step,
and in which order, depends on lengths and slots alone; how long it takes follows from the cost of the work done
(`rates.py`). The steps are those of the scheduler: groups are begun until N' are under way, samples get slots oldest
first, give way where the KV cache is full (`stays.py`), and a step ends as soon as N groups are complete and the others
can still be trained on within the bound.

An episode's sample is away while its environment answers, and another one decodes in its slot. Waits are taken to be
spread over the response in proportion to its tokens: with `away` decode steps of waiting for each that it decodes, a
sample takes 1 + away times as long, and as many more samples share the slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from april.rollout.admission.rates import EngineRates, crowded_tokens
from april.rollout.admission.stays import FURTHER, Stays, crowd, queue

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
    saturated: bool = False
    """No step began all that were to be under way: more of them would change nothing."""

    def towards(self, newest: Forecast, weight: float) -> Forecast:
        """The mean of both, of which `newest` makes up `weight`."""

        def mean(before: float, now: float) -> float:
            return before + weight * (now - before)

        return Forecast(
            self.target,
            mean(self.consumed_tokens_per_second, newest.consumed_tokens_per_second),
            mean(self.staleness, newest.staleness),
            mean(self.occupancy, newest.occupancy),
            newest.saturated,
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
        admitted, saturated = 0, True
        seconds = stale = sampled = depth = 0.0
        for version in range(steps):
            new = np.arange(admitted, admitted + max(target - len(left), 0)) % len(lengths)
            admitted += len(new)
            left = np.concatenate((left, lengths[new]))
            total = np.concatenate((total, lengths[new]))
            begun = np.concatenate((begun, np.full(len(new), NOT_BEGUN)))
            stays, end, chosen = self._play(left, total, begun, version)
            active = left > 0
            before, rows = (total - left)[active] / stretch, stays.sample
            gained = np.maximum(np.minimum(stays.stop, end) - stays.start, 0.0)
            progress = np.bincount(rows, gained, len(before))
            starts = np.full_like(left, np.inf)
            starts[active] = stays.start[: len(before)]
            still = left[active] - progress
            left[active] = np.where(still > 1e-6, still, 0.0)  # sums of several stays are rounded
            begun[(begun == NOT_BEGUN) & (starts.min(1) < end)] = version
            saturated &= bool(begun.max() == NOT_BEGUN)
            if version >= skip:
                tokens, ran = gained / stretch, gained > 0
                context = self.prompt_tokens + before[rows] + stays.had / stretch
                first = ran & (np.arange(len(rows)) < len(before))
                fresh = first & (before[rows] == 0)
                at = np.minimum(stays.start, end)
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
                sampled, depth = sampled + tokens.sum(), depth + end
            left, total, begun = left[~chosen], total[~chosen], begun[~chosen]
        occupancy = sampled / max(depth * self.slots, 1e-9)
        rate = min(sampled / max(seconds, 1e-12), self._trainers_rate)
        return Forecast(target, rate, stale / max(steps - skip, 1), occupancy, saturated)

    def _play(
        self, left: Floats, total: Floats, begun: NDArray[np.int64], version: int
    ) -> tuple[Stays, float, NDArray[np.bool_]]:
        """Stays of the samples that are not complete, when the step ends, and which groups it trains on."""
        active, stretch = left > 0, 1 + self.away
        work, slots = left[active], int(stretch * self.slots)

        def over(stays: Stays) -> tuple[float, NDArray[np.bool_]]:
            complete, starts = np.zeros_like(left), np.full_like(left, np.inf)
            complete[active] = stays.complete(work)
            starts[active] = stays.start[: len(work)]
            return self._end(complete.max(1), starts.min(1), begun, version)

        stays = Stays.whole(queue(work, slots), work)
        end, chosen = over(stays)
        if self.kv_tokens is None:
            return stays, end, chosen
        # Of samples that are away, only the part that decodes holds KV cache in the engine.
        held, room = (total - left)[active] + stretch * self.prompt_tokens, self.kv_tokens * stretch**2
        if stays.peak(held, end) <= room:
            return stays, end, chosen
        for stays in crowd(held, work, slots, room, FURTHER * end):
            end, chosen = over(stays)
            if end < inf:
                break
        return stays, end, chosen

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
        """When the step ends, in tokens from its start, and which groups it trains on (`staleness.select`); inf if not
        enough groups are seen to be complete."""
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
            due = self.batch_size * (rest + self.max_staleness - version)
            if (np.arange(len(rest)) < due).all():
                return end, chosen
        return inf, chosen
