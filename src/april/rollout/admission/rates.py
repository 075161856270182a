"""What an engine's work costs in time, learned from the steps it took.

All samples that decode together get a token each per decode step, and a decode step takes `step + sample * running +
crowded * (running above half the slots) + context * tokens held by them` seconds: a batch costs little while reading
the weights takes longer than computing with them, and more beyond. So a stay in the engine takes `step` seconds for
each token of its own, `sample` for each token that anyone sampled meanwhile, `crowded` for those of them above half the
slots, `context` for each token of KV cache that was read for them, and the prefill of whatever was submitted meanwhile:
`prompt` for each token of a new prompt, `resumed` for each token of a prompt and partial response that goes on. These
six costs are fitted to the stays that began with a step; an engine that keeps its KV caches shows a `resumed` near zero
of its own accord.

Invariants:
- no cost is below zero, whatever was observed;
- a stay weighs as much as it lasted, so a step of no or hardly any duration changes nothing;
- what recent steps say nothing about stays as earlier ones had it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.step import Span

Floats = NDArray[np.float64]

COSTS = 6
PARTS = 8
"""Parts of a stay in which its context counts as constant."""
LASTING = 0.05
"""Weight of what is remembered ten times as long: it decides where recent steps cannot tell costs apart."""
DOUBT = 3e-5
"""Weight of what is physically likely, as a share of what was observed."""
_FREE = np.array(list(itertools.product((False, True), repeat=COSTS)))
"""Every choice of costs that are not zero, shape [64, 6]."""


class EngineRates:
    """Seconds of engine time per unit of work.

    Args:
        half_life: steps after which an observation counts half.
    """

    def __init__(self, half_life: float = 6.0) -> None:
        self.decay = np.array([0.5 ** (1.0 / half_life), 0.5 ** (0.1 / half_life)])
        self.costs = np.zeros(COSTS)
        """Seconds per decode step, token sampled, one above half the slots, token read, prompt token, resumed token."""
        self._normal = np.zeros((2, COSTS, COSTS))
        """Of the least squares: of recent steps, and of those remembered longer."""
        self._target = np.zeros((2, COSTS))
        self._lasted = np.zeros(2)
        """Sums of stays' durations and of their squares."""

    @property
    def known(self) -> bool:
        return bool(self.costs.any())

    def seconds(
        self, depth: float, sampled: float, crowded: float, read: float, prompt: float, resumed: float
    ) -> float:
        """Engine time for `depth` decode steps in which so many tokens are sampled (`crowded` of them above half the
        slots), read and prefilled."""
        return float(self.costs @ np.array([depth, sampled, crowded, read, prompt, resumed], dtype=float))

    def observe(self, spans: Sequence[Span], prompt_tokens: float, slots: int) -> None:
        """Learn from one step's stays in the engine; new prompts are `prompt_tokens` long on average."""
        begun = [span for span in spans if span.queued is not None and span.after > span.before]
        if not begun:
            return
        columns = ((s.start, s.queued, s.end, s.first_tokens, s.before, s.after) for s in begun)
        submitted, first, end, first_tokens, before, after = np.array(list(columns), dtype=float).T
        first, end = first + submitted - submitted.min(), end - submitted.min()
        tokens, together = after - before, min(slots, _peak(first, end))
        # Stays that began with the step, seen at their first tokens and at their last. All that decode gain a token at
        # a time, so together they are a clock that counts decode steps; everybody's work is laid out along it.
        rows = (np.arange(len(begun)) < together) & (submitted - submitted.min() < 0.05 * end.max()) & (first > 0)
        if not rows.any():
            return
        until, own = np.concatenate((first[rows], end[rows])), np.concatenate((first_tokens[rows], tokens[rows]))
        by_time = np.argsort(until, kind="stable")
        own[by_time] = np.maximum.accumulate(own[by_time])  # one that was preempted on its way fell behind the others
        clock = np.interp(first, until[by_time], own[by_time])
        enters = np.where(rows, 0.0, np.maximum(clock - first_tokens, 0.0))
        sampled = _integral(enters, enters + tokens, np.ones(len(begun)), own)
        crowded = crowded_tokens(enters, enters + tokens, slots, own)
        part = np.arange(PARTS)[:, None] / PARTS
        held = prompt_tokens + before + tokens * (part + 0.5 / PARTS)  # the context grows as it is read
        into, out = enters + tokens * part, enters + tokens * (part + 1 / PARTS)
        read = _integral(into.ravel(), out.ravel(), held.ravel(), own)
        submitted_again = (before > 0) & ~np.array([span.running for span in begun])
        new, old = np.where(before == 0, prompt_tokens, 0.0), np.where(submitted_again, prompt_tokens + before, 0.0)
        by_turn = np.argsort(enters, kind="stable")
        upto = np.searchsorted(enters[by_turn], own, "right")
        prefilled = [np.concatenate(([0.0], np.cumsum(work[by_turn])))[upto] for work in (new, old)]
        work = np.stack([own, sampled, crowded, read, *prefilled], axis=1)
        self._lasted = self.decay[0] * self._lasted + [until.mean(), (until**2).mean()]
        usual = self._lasted[1] / self._lasted[0]
        weight = until / np.maximum(until, usual) ** 2 / len(work)
        self._normal = self.decay[:, None, None] * self._normal + (weight[:, None] * work).T @ work
        self._target = self.decay[:, None] * self._target + (weight * until) @ work
        self._fit(slots)

    def _fit(self, slots: int) -> None:
        """Least squares around what is physically likely, with no cost below zero."""
        normal, target = (sums[0] + LASTING * sums[1] for sums in (self._normal, self._target))
        step = target[0] / normal[0, 0]
        context = normal[0, 3] / normal[0, 1]
        # With all slots taken, samples and attention may well make a decode step twice as long. A token to prefill
        # costs a few percent of a decode step at most; that costs nothing until seen, so that it is tried.
        likely = step * np.array([0.7, 0, 0, 0, 0, 0])
        spread = step * np.array([0.3, 0.1 / slots, 0.5 / slots, 0.3 / (slots * context), 0.03, 0.03])
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
