"""Time costs of an engine's work, learned from its steps.

All samples that decode together get one token each per decode step, and a decode step takes `step + sample * running +
above_half * (running above half the slots) + context * tokens held by them` seconds: a batch costs little while reading
the weights takes longer than computing, and more beyond. So an interval in a slot takes `step` seconds for each of its
tokens, `sample` for each token that any sample gained during the interval, `above_half` for each such token above half
the slots, `context` for each token of KV cache that was read for them, and the prefill of samples submitted during the
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
from typing import Any, NamedTuple

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


class Work(NamedTuple):
    """Work of an engine, in the order of the costs."""

    decode_steps: float
    sampled: float
    """Tokens sampled."""
    above_half: float
    """Tokens sampled above half the slots."""
    read: float
    """Tokens of KV cache read, summed over decode steps."""
    prompt: float
    """Tokens of new prompts prefilled."""
    resumed: float
    """Tokens of resumed samples prefilled."""
    preempted: float
    """Tokens of preempted samples prefilled."""


class _Clock(NamedTuple):
    """Times of a step, and the number of decode steps up to each, by the requests that started with the step. All
    samples that decode gain one token per decode step, so their tokens time the work of all samples."""

    seconds: Floats
    decode_steps: Floats


class _Requests(NamedTuple):
    """Requests of one step that gained tokens; arrays of shape [requests]."""

    submitted: Floats
    """Seconds from the first submission; likewise `first` and `end`."""
    first: Floats
    """Time of the first tokens."""
    end: Floats
    first_tokens: Floats
    """Number of tokens that arrived first together."""
    gained: Floats
    before: Floats
    """Response tokens at the submission."""
    held: Floats
    """Tokens of prompt and response at the submission."""
    cached: NDArray[np.bool_]
    """The engine still held the sample's KV cache."""

    @classmethod
    def of(cls, requests: Sequence[RequestInterval], cached: NDArray[np.bool_], prompt_tokens: float) -> _Requests:
        columns = [(r.start, r.queued, r.end, r.first_tokens, r.before, r.after) for r in requests]
        submitted, queued, end, first_tokens, before, after = np.array(columns, dtype=float).T
        start = submitted.min()
        return cls(
            submitted - start,
            queued + submitted - start,
            end - start,
            first_tokens,
            after - before,
            before,
            prompt_tokens + before,
            cached,
        )

    @property
    def at_once(self) -> NDArray[np.bool_]:
        """Whether the request was submitted at the start of the step."""
        return np.asarray(self.submitted < 0.05 * self.end.max(), dtype=bool)

    def started_together(self, slots: int) -> NDArray[np.bool_]:
        """Return which requests got a slot at the start of the step."""
        together = min(slots, _peak(self.first, self.end))
        return (np.arange(len(self.first)) < together) & self.at_once & (self.first > 0)

    def simulate_preemption(self, capacity: Capacity) -> SlotIntervals | None:
        """Return simulated intervals if samples were preempted, which the engine does not report; None otherwise."""
        if capacity.kv_tokens is None or not self.at_once.all():
            return None
        intervals = SlotIntervals.uninterrupted(slot_starts(self.gained, capacity.slots), self.gained)
        if intervals.peak(self.held, inf) <= capacity.kv_tokens:
            return None
        return next(with_preemption(self.held, self.gained, capacity.slots, capacity.kv_tokens))

    def clock(self, on_clock: NDArray[np.bool_]) -> _Clock:
        """Return the clock by the first and last tokens of some requests that started together."""
        seconds = np.concatenate((self.first[on_clock], self.end[on_clock]))
        tokens = np.concatenate((self.first_tokens[on_clock], self.gained[on_clock]))
        by_time = np.argsort(seconds, kind="stable")
        seconds, tokens = seconds[by_time], tokens[by_time]
        abreast = tokens >= ABREAST * np.maximum.accumulate(tokens)  # the others were preempted
        return _Clock(seconds[abreast], tokens[abreast])

    def timed_by(self, clock: _Clock, on_clock: NDArray[np.bool_]) -> SlotIntervals:
        """Return the intervals without preemption, in decode steps, by the time of each request's first tokens."""
        first = np.interp(self.first, clock.seconds, clock.decode_steps)
        start = np.where(on_clock, 0.0, np.maximum(first - self.first_tokens, 0.0))
        return SlotIntervals.uninterrupted(start, self.gained)


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
        decode_steps: float,
        sampled: float,
        above_half: float,
        read: float,
        prompt: float,
        resumed: float,
        preempted: float = 0.0,
    ) -> float:
        """Return the engine time of some work; see `Work`."""
        work = [decode_steps, sampled, above_half, read, prompt, resumed, preempted]
        return float(self.costs @ np.array(work, dtype=float))

    def observe(self, requests: Sequence[RequestInterval], prompt_tokens: float, capacity: Capacity) -> None:
        """Learn from the requests of one step; new prompts have `prompt_tokens` tokens on average."""
        answered = [request for request in requests if request.queued is not None and request.after > request.before]
        if not answered:
            return
        table = _Requests.of(answered, _without_prefill(answered, requests), prompt_tokens)
        on_clock = table.started_together(capacity.slots)
        simulated = table.simulate_preemption(capacity)
        if simulated is not None:
            on_clock[simulated.sample[len(answered) :]] = False  # preempted samples
        if not on_clock.any():
            return
        clock = table.clock(on_clock)
        intervals = table.timed_by(clock, on_clock) if simulated is None else simulated
        self._add(_work(table, intervals, clock.decode_steps, capacity.slots), clock.seconds)
        self._fit(capacity.slots)

    def _add(self, work: Floats, seconds: Floats) -> None:
        """Add one equation for each time of the clock to the sums: the work up to this time took these seconds."""
        lasted = np.array([seconds.mean(), (seconds**2).mean()])
        # A step that is shorter than usual contains less information, so it makes older steps forgotten more slowly.
        decay = DECAY ** min(lasted[0] * self._lasted[0] / max(self._lasted[1], 1e-12), 1.0)
        self._lasted = decay[0] * self._lasted + lasted
        usual = self._lasted[1] / self._lasted[0]
        weight = seconds / np.maximum(seconds, usual) ** 2 / len(work)
        self._normal = decay[:, None, None] * self._normal + (weight[:, None] * work).T @ work
        self._target = decay[:, None] * self._target + (weight * seconds) @ work

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

    def resumed_seconds(self, requests: Sequence[RequestInterval], prompt_tokens: float) -> float:
        """Return the engine time in which the samples that one step has resumed were prefilled."""
        resumed = [request for request in requests if request.before > 0 and request.queued is not None]
        held = np.array([prompt_tokens + request.before for request in resumed])
        return float(self.costs[RESUMED] * held[~_without_prefill(resumed, requests)].sum())

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


def _without_prefill(some: Sequence[RequestInterval], requests: Sequence[RequestInterval]) -> NDArray[np.bool_]:
    """Return which of `some` of a step's requests needed no prefill: the engine still held the KV cache of the sample,
    which was running, or had ended a turn in the same step."""
    last: dict[str, str] = {}
    cached = {id(request) for request in requests if request.running}
    for request in sorted(requests, key=lambda request: request.start):
        if last.get(request.sample_id) == "turn":
            cached.add(id(request))
        last[request.sample_id] = request.outcome
    return np.array([id(request) in cached for request in some], dtype=bool)


def _work(table: _Requests, intervals: SlotIntervals, at: Floats, slots: int) -> Floats:
    """Return the work up to each of the times `at`, in decode steps; shape [times, 7]."""
    gained = intervals.stop - intervals.start
    sampled = _integral(intervals.start, intervals.stop, np.ones(len(gained)), at)
    above_half = tokens_above_half(intervals.start, intervals.stop, slots, at)
    part = np.arange(PARTS)[:, None] / PARTS
    context = _held(table, intervals) + gained * (part + 0.5 / PARTS)  # it grows as it is read
    into, out = intervals.start + gained * part, intervals.start + gained * (part + 1 / PARTS)
    read = _integral(into.ravel(), out.ravel(), context.ravel(), at)
    return np.stack([at, sampled, above_half, read, *_prefill(table, intervals, at)], axis=1)


def _prefill(table: _Requests, intervals: SlotIntervals, at: Floats) -> list[Floats]:
    """Return the tokens of new, resumed and preempted samples that were prefilled up to each of the times `at`."""
    sample = intervals.sample
    first = np.arange(len(sample)) < len(table.before)  # a later interval of a sample follows a preemption
    new = first & (table.before[sample] == 0)
    resumed = first & (table.before[sample] > 0) & ~table.cached[sample]
    by_start = np.argsort(intervals.start, kind="stable")
    upto = np.searchsorted(intervals.start[by_start], at, "right")
    prefilled = (np.where(whom, _held(table, intervals), 0.0)[by_start] for whom in (new, resumed, ~first))
    return [np.concatenate(([0.0], np.cumsum(tokens)))[upto] for tokens in prefilled]


def _held(table: _Requests, intervals: SlotIntervals) -> Floats:
    """Return the tokens that each interval's sample had at the start of the interval."""
    return table.held[intervals.sample] + intervals.had


def tokens_above_half(start: Floats, end: Floats, slots: float, at: Floats) -> Floats:
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
