"""Time costs of an engine's work, learned from its steps.

All samples that decode together get one token each per decode step, and a decode step takes `step + sample * running +
crowded * (running above half the slots) + context * tokens held by them` seconds: a batch costs little while reading
the weights takes longer than computing, and more beyond. So an interval in a slot takes `step` seconds for each of its
tokens, `sample` for each token that any sample gained during the interval, `crowded` for each such token above half the
slots, `context` for each token of KV cache that was read for them, and the prefill of samples submitted during the
interval: `prompt` for each token of a new prompt, `resumed` for each token of a resumed prompt and partial response,
and `preempted` for each token of a sample that was preempted during the step because the KV cache was full. These seven
costs are fitted to the intervals that started with a step. For an engine that keeps its KV caches, the fit finds a
`resumed` near zero. An engine does not report which samples it preempted, so these are determined by a simulation of
the step (`slot_intervals.py`).

Invariants:
- no cost is below zero for any observations;
- the weight of an interval is its duration, and a step reduces the weight of earlier ones by its share of the usual
  duration of a step, so a step of almost no duration changes nothing;
- costs about which recent steps contain no information keep their earlier values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.admission.slot_intervals import Floats, SlotIntervals, slot_starts, with_preemption
from april.rollout.engine import Capacity
from april.rollout.request_interval import RequestInterval

COSTS, RESUMED = 7, 5
"""Number of the costs, and the index of the cost of resumed tokens."""
PARTS = 8
"""Parts of an interval in which its context is treated as constant."""
ABREAST = 0.75
"""Share of the decode steps of the most advanced interval above which an interval counts as never preempted: replicas
of one engine do not decode equally fast."""
DECAY = np.array([0.5 ** (1 / 6), 0.5 ** (0.1 / 6)])
"""Factors by which a step of usual duration reduces the weight of earlier steps: half-lives of 6 and of 60 steps."""
LASTING = 0.05
"""Weight of the sums with the longer half-life, which decide if recent steps cannot distinguish costs."""
DOUBT = 3e-5
"""Weight of the prior, as a share of the observations."""
_FREE = np.array(list(itertools.product((False, True), repeat=COSTS)))
"""Every subset of costs that are not zero, shape [128, 7]."""


class EngineRates:
    """Seconds of engine time per unit of work."""

    def __init__(self) -> None:
        self.costs = np.zeros(COSTS)
        """Seconds per decode step, per token sampled, per token sampled above half the slots, per token read, and per
        token prefilled of new, resumed and preempted samples."""
        self._normal = np.zeros((2, COSTS, COSTS))
        """Sums of the least squares: of recent steps, and with the longer half-life."""
        self._target = np.zeros((2, COSTS))
        self._lasted = np.zeros(2)
        """Sums of the intervals' durations and of their squares."""

    def seconds(
        self,
        depth: float,
        sampled: float,
        crowded: float,
        read: float,
        prompt: float,
        resumed: float,
        preempted: float = 0.0,
    ) -> float:
        """Return the engine time of `depth` decode steps in which the given numbers of tokens are sampled (`crowded` of
        them above half the slots), read and prefilled."""
        return float(self.costs @ np.array([depth, sampled, crowded, read, prompt, resumed, preempted], dtype=float))

    def observe(self, spans: Sequence[RequestInterval], prompt_tokens: float, capacity: Capacity) -> None:
        """Learn from one step's intervals in the engine; new prompts have `prompt_tokens` tokens on average."""
        slots, kv_tokens = capacity.slots, capacity.kv_tokens
        begun = [span for span in spans if span.queued is not None and span.after > span.before]
        if not begun:
            return
        columns = ((s.start, s.queued, s.end, s.first_tokens, s.before, s.after) for s in begun)
        submitted, first, end, first_tokens, before, after = np.array(list(columns), dtype=float).T
        first, end = first + submitted - submitted.min(), end - submitted.min()
        tokens, together = after - before, min(slots, _peak(first, end))
        # Intervals that started with the step, at their first and last tokens. All samples that decode gain one token
        # per decode step, so these intervals are a clock of decode steps, by which the work of all samples is timed.
        at_once = submitted - submitted.min() < 0.05 * end.max()
        rows = (np.arange(len(begun)) < together) & at_once & (first > 0)
        intervals, held = SlotIntervals.uninterrupted(np.zeros(len(begun)), tokens), prompt_tokens + before
        crowded_out = False
        if kv_tokens is not None and at_once.all():
            intervals = SlotIntervals.uninterrupted(slot_starts(tokens, slots), tokens)
            if crowded_out := intervals.peak(held, inf) > kv_tokens:
                # The engine does not report preempted samples; a simulation of the step determines them.
                intervals = next(with_preemption(held, tokens, slots, kv_tokens))
                rows[intervals.sample[len(begun) :]] = False
        if not rows.any():
            return
        until, own = np.concatenate((first[rows], end[rows])), np.concatenate((first_tokens[rows], tokens[rows]))
        by_time = np.argsort(until, kind="stable")
        abreast = own[by_time] >= ABREAST * np.maximum.accumulate(own[by_time])  # the others were preempted
        until, own = until[by_time][abreast], own[by_time][abreast]
        if not crowded_out:
            enters = np.where(rows, 0.0, np.maximum(np.interp(first, until, own) - first_tokens, 0.0))
            intervals = SlotIntervals.uninterrupted(enters, tokens)
        sample, gained = intervals.sample, intervals.stop - intervals.start
        sampled = _integral(intervals.start, intervals.stop, np.ones(len(sample)), own)
        crowded = crowded_tokens(intervals.start, intervals.stop, slots, own)
        part = np.arange(PARTS)[:, None] / PARTS
        context = (held[sample] + intervals.had) + gained * (part + 0.5 / PARTS)  # it grows as it is read
        into, out = intervals.start + gained * part, intervals.start + gained * (part + 1 / PARTS)
        read = _integral(into.ravel(), out.ravel(), context.ravel(), own)
        earliest, running = np.arange(len(sample)) < len(begun), np.array([span.running for span in begun])
        cached = running | _continue_turns(spans, begun)
        new, old = earliest & (before[sample] == 0), earliest & (before[sample] > 0) & ~cached[sample]
        by_turn = np.argsort(intervals.start, kind="stable")
        upto = np.searchsorted(intervals.start[by_turn], own, "right")
        work = (np.where(whom, held[sample] + intervals.had, 0.0)[by_turn] for whom in (new, old, ~earliest))
        prefilled = [np.concatenate(([0.0], np.cumsum(each)))[upto] for each in work]
        # One equation for each token time of the clock: the work up to it took `until` seconds.
        lines = np.stack([own, sampled, crowded, read, *prefilled], axis=1)
        lasted = np.array([until.mean(), (until**2).mean()])
        # A step that is shorter than usual contains less information, so it makes older steps forgotten more slowly.
        decay = DECAY ** min(lasted[0] * self._lasted[0] / max(self._lasted[1], 1e-12), 1.0)
        self._lasted = decay[0] * self._lasted + lasted
        usual = self._lasted[1] / self._lasted[0]
        weight = until / np.maximum(until, usual) ** 2 / len(lines)
        self._normal = decay[:, None, None] * self._normal + (weight[:, None] * lines).T @ lines
        self._target = decay[:, None] * self._target + (weight * until) @ lines
        self._fit(slots)

    def _fit(self, slots: int) -> None:
        """Fit the costs by least squares with a physical prior, with no cost below zero."""
        normal, target = (sums[0] + LASTING * sums[1] for sums in (self._normal, self._target))
        step = target[0] / normal[0, 0]
        context = normal[0, 3] / normal[0, 1]
        # With all slots in use, samples and attention may double the time of a decode step. Prefill of a token costs a
        # few percent of a decode step at most; the prior is zero, so that larger N' are tried.
        likely = step * np.array([0.7, 0, 0, 0, 0, 0, 0])
        spread = step * np.array([0.3, 0.1 / slots, 0.5 / slots, 0.3 / (slots * context), 0.03, 0.03, 0.03])
        belief = DOUBT * step * target[0] / spread**2
        equations = (normal + np.diag(belief)) * np.outer(spread, spread)
        self.costs = spread * _not_negative(equations, (target + belief * likely) * spread)

    def resumed_seconds(self, spans: Sequence[RequestInterval], prompt_tokens: float) -> float:
        """Return the engine time in which the samples that one step has resumed were prefilled."""
        resumed = [span for span in spans if span.before > 0 and span.queued is not None and not span.running]
        prefilled = ~_continue_turns(spans, resumed)
        held = np.array([prompt_tokens + span.before for span in resumed])
        return float(self.costs[RESUMED] * held[prefilled].sum())

    def state_dict(self) -> dict[str, Any]:
        return {
            "costs": self.costs.tolist(),
            "normal": self._normal.tolist(),
            "target": self._target.tolist(),
            "lasted": self._lasted.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.costs = np.array(state["costs"])
        self._normal, self._target = np.array(state["normal"]), np.array(state["target"])
        self._lasted = np.array(state["lasted"])


def _not_negative(normal: Floats, target: Floats) -> Floats:
    """Return the least squares solution of the normal equations without negative entries: the best over all subsets of
    free entries."""
    both = _FREE[:, :, None] & _FREE[:, None, :]
    equations = np.where(both, normal, np.eye(len(target)))
    found = np.linalg.solve(equations, np.where(_FREE, target, 0.0)[:, :, None])[:, :, 0]
    # At a solution of the normal equations, the squared error is a constant minus this product.
    loss = np.where((found >= 0).all(1), -(found @ target), np.inf)
    best: Floats = found[np.argmin(loss)]
    return best


def _continue_turns(spans: Sequence[RequestInterval], begun: Sequence[RequestInterval]) -> NDArray[np.bool_]:
    """Return which of `begun` follow a turn of the same step: the engine still holds the sample's KV cache."""
    last: dict[str, str] = {}
    continued = set()
    for span in sorted(spans, key=lambda span: span.start):
        if last.get(span.sample_id) == "turn":
            continued.add(id(span))
        last[span.sample_id] = span.outcome
    return np.array([id(span) in continued for span in begun], dtype=bool)


def crowded_tokens(start: Floats, end: Floats, slots: float, at: Floats) -> Floats:
    """Return the tokens sampled above half the slots up to each time of `at`; each interval samples one per step."""
    return _integral(start, end, np.ones(len(start)), at, above=slots / 2)


def _peak(start: Floats, end: Floats) -> int:
    """Return the largest number of simultaneous intervals."""
    times = np.concatenate((end, start))
    change = np.concatenate((-np.ones(len(end)), np.ones(len(start))))
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max())


def _integral(start: Floats, end: Floats, rate: Floats, at: Floats, above: float = 0.0) -> Floats:
    """Return the integral up to each of the times `at` of the summed rates of all intervals, as far as the sum is above
    `above`."""
    times, change = np.concatenate((start, end)), np.concatenate((rate, -rate))
    order = np.argsort(times, kind="stable")
    times, slope = times[order], np.maximum(np.cumsum(change[order]) - above, 0.0)
    total = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(times))))
    found: Floats = np.interp(at, times, total)
    return found
