"""What an engine's work costs in time, learned from the steps it took.

All samples that decode together get a token each per decode step, and a decode step takes `step + sample * running +
crowded * (running above half the slots) + context * tokens held by them` seconds: a batch costs little while reading
the weights takes longer than computing with them, and more beyond. So a stay in the engine takes `step` seconds for
each token of its own, `sample` for each token that anyone sampled meanwhile, `crowded` for those of them above half the
slots, `context` for each token of KV cache that was read for them, and the prefill of whatever was submitted meanwhile:
`prompt` for each token of a new prompt, `resumed` for each token of a prompt and partial response that goes on, and
`preempted` for each one of those that had to give way in the midst of the step, as the KV cache was full. These seven
costs are fitted to the stays that began with a step; an engine that keeps its KV caches shows a `resumed` near zero of
its own accord. An engine does not say whom it preempted, so a step is played again (`stays.py`) to see that.

Invariants:
- no cost is below zero, whatever was observed;
- a stay weighs as much as it lasted, and a step makes forget by its share of a usual step's duration, so one of no or
  hardly any duration changes nothing;
- what recent steps say nothing about stays as earlier ones had it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.admission.stays import Stays, crowd, queue
from april.rollout.batch import RequestInterval
from april.rollout.engine import Capacity

Floats = NDArray[np.float64]

COSTS = 7
PARTS = 8
"""Parts of a stay in which its context counts as constant."""
ABREAST = 0.75
"""Part of the decode steps of the one that is furthest that a stay needs, to count as one that was never preempted:
replicas of one engine do not decode equally fast."""
LASTING = 0.05
"""Weight of what is remembered ten times as long: it decides where recent steps cannot tell costs apart."""
DOUBT = 3e-5
"""Weight of what is physically likely, as a share of what was observed."""
_FREE = np.array(list(itertools.product((False, True), repeat=COSTS)))
"""Every choice of costs that are not zero, shape [128, 7]."""


class EngineRates:
    """Seconds of engine time per unit of work.

    Args:
        half_life: steps after which an observation counts half.
    """

    def __init__(self, half_life: float = 6.0) -> None:
        self.decay = np.array([0.5 ** (1.0 / half_life), 0.5 ** (0.1 / half_life)])
        self.costs = np.zeros(COSTS)
        """Seconds per decode step, token sampled, one above half the slots, token read, and per token prefilled of a
        prompt, of what is resumed, and of what was preempted."""
        self._normal = np.zeros((2, COSTS, COSTS))
        """Of the least squares: of recent steps, and of those remembered longer."""
        self._target = np.zeros((2, COSTS))
        self._lasted = np.zeros(2)
        """Sums of stays' durations and of their squares."""

    @property
    def known(self) -> bool:
        return bool(self.costs.any())

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
        """Engine time for `depth` decode steps in which so many tokens are sampled (`crowded` of them above half the
        slots), read and prefilled."""
        return float(self.costs @ np.array([depth, sampled, crowded, read, prompt, resumed, preempted], dtype=float))

    def observe(self, spans: Sequence[RequestInterval], prompt_tokens: float, capacity: Capacity) -> None:
        """Learn from one step's stays in the engine; new prompts are `prompt_tokens` long on average."""
        slots, kv_tokens = capacity.slots, capacity.kv_tokens
        begun = [span for span in spans if span.queued is not None and span.after > span.before]
        if not begun:
            return
        columns = ((s.start, s.queued, s.end, s.first_tokens, s.before, s.after) for s in begun)
        submitted, first, end, first_tokens, before, after = np.array(list(columns), dtype=float).T
        first, end = first + submitted - submitted.min(), end - submitted.min()
        tokens, together = after - before, min(slots, _peak(first, end))
        # Stays that began with the step, seen at their first tokens and at their last. All that decode gain a token at
        # a time, so together they are a clock that counts decode steps; everybody's work is laid out along it.
        at_once = submitted - submitted.min() < 0.05 * end.max()
        rows = (np.arange(len(begun)) < together) & at_once & (first > 0)
        stays, held = Stays.whole(np.zeros(len(begun)), tokens), prompt_tokens + before
        crowded_out = False
        if kv_tokens is not None and at_once.all():
            stays = Stays.whole(queue(tokens, slots), tokens)
            if crowded_out := stays.peak(held, inf) > kv_tokens:
                # The engine does not say whom it preempted: those who are when the step is played again.
                stays = next(crowd(held, tokens, slots, kv_tokens))
                rows[stays.sample[len(begun) :]] = False
        if not rows.any():
            return
        until, own = np.concatenate((first[rows], end[rows])), np.concatenate((first_tokens[rows], tokens[rows]))
        by_time = np.argsort(until, kind="stable")
        abreast = own[by_time] >= ABREAST * np.maximum.accumulate(own[by_time])  # the others were preempted
        until, own = until[by_time][abreast], own[by_time][abreast]
        if not crowded_out:
            enters = np.where(rows, 0.0, np.maximum(np.interp(first, until, own) - first_tokens, 0.0))
            stays = Stays.whole(enters, tokens)
        sample, gained = stays.sample, stays.stop - stays.start
        sampled = _integral(stays.start, stays.stop, np.ones(len(sample)), own)
        crowded = crowded_tokens(stays.start, stays.stop, slots, own)
        part = np.arange(PARTS)[:, None] / PARTS
        context = (held[sample] + stays.had) + gained * (part + 0.5 / PARTS)  # it grows as it is read
        into, out = stays.start + gained * part, stays.start + gained * (part + 1 / PARTS)
        read = _integral(into.ravel(), out.ravel(), context.ravel(), own)
        earliest, running = np.arange(len(sample)) < len(begun), np.array([span.running for span in begun])
        new, old = earliest & (before[sample] == 0), earliest & (before[sample] > 0) & ~running[sample]
        by_turn = np.argsort(stays.start, kind="stable")
        upto = np.searchsorted(stays.start[by_turn], own, "right")
        work = (np.where(whom, held[sample] + stays.had, 0.0)[by_turn] for whom in (new, old, ~earliest))
        prefilled = [np.concatenate(([0.0], np.cumsum(each)))[upto] for each in work]
        lines = np.stack([own, sampled, crowded, read, *prefilled], axis=1)
        lasted = np.array([until.mean(), (until**2).mean()])
        decay = self.decay ** min(lasted[0] * self._lasted[0] / max(self._lasted[1], 1e-12), 1.0)
        self._lasted = decay[0] * self._lasted + lasted
        usual = self._lasted[1] / self._lasted[0]
        weight = until / np.maximum(until, usual) ** 2 / len(lines)
        self._normal = decay[:, None, None] * self._normal + (weight[:, None] * lines).T @ lines
        self._target = decay[:, None] * self._target + (weight * until) @ lines
        self._fit(slots)

    def _fit(self, slots: int) -> None:
        """Least squares around what is physically likely, with no cost below zero."""
        normal, target = (sums[0] + LASTING * sums[1] for sums in (self._normal, self._target))
        step = target[0] / normal[0, 0]
        context = normal[0, 3] / normal[0, 1]
        # With all slots taken, samples and attention may well make a decode step twice as long. A token to prefill
        # costs a few percent of a decode step at most; that costs nothing until seen, so that it is tried.
        likely = step * np.array([0.7, 0, 0, 0, 0, 0, 0])
        spread = step * np.array([0.3, 0.1 / slots, 0.5 / slots, 0.3 / (slots * context), 0.03, 0.03, 0.03])
        belief = DOUBT * step * target[0] / spread**2
        equations = (normal + np.diag(belief)) * np.outer(spread, spread)
        self.costs = spread * _not_negative(equations, (target + belief * likely) * spread)

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
    """The least squares solution of the normal equations in which no entry is below zero: the best of all choices of
    entries that are free."""
    both = _FREE[:, :, None] & _FREE[:, None, :]
    equations = np.where(both, normal, np.eye(len(target)))
    found = np.linalg.solve(equations, np.where(_FREE, target, 0.0)[:, :, None])[:, :, 0]
    loss = np.where((found >= 0).all(1), -(found @ target), np.inf)
    best: Floats = found[np.argmin(loss)]
    return best


def crowded_tokens(start: Floats, end: Floats, slots: float, at: Floats) -> Floats:
    """Tokens that have been sampled beyond half the slots by each of `at`, if each stay samples from start to end."""
    return _integral(start, end, np.ones(len(start)), at, above=slots / 2)


def _peak(start: Floats, end: Floats) -> int:
    """The most stays at any one time."""
    times = np.concatenate((end, start))
    change = np.concatenate((-np.ones(len(end)), np.ones(len(start))))
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max())


def _integral(start: Floats, end: Floats, rate: Floats, at: Floats, above: float = 0.0) -> Floats:
    """What has come together by `at` if each stay yields at its rate from start to end; only what all of them yield
    `above` that rate."""
    times, change = np.concatenate((start, end)), np.concatenate((rate, -rate))
    order = np.argsort(times, kind="stable")
    times, slope = times[order], np.maximum(np.cumsum(change[order]) - above, 0.0)
    total = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(times))))
    found: Floats = np.interp(at, times, total)
    return found
