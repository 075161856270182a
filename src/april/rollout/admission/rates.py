"""What an engine's work costs in time, learned from the steps it took.

All samples that decode together get a token each per decode step, and a decode step takes `step + sample * running +
crowded * (running above half the slots) + context * tokens held by them` seconds: a batch costs little while reading
the weights takes longer than computing with them, and more beyond. So a stay in the engine takes `step` seconds for
each token of its own, `sample` for each token that anyone sampled meanwhile, `crowded` for those of them above half the
slots, `context` for each token of KV cache that was read for them, and the prefill of whatever was submitted meanwhile:
`prompt` for each token of a new prompt, `resumed` for each token of a prompt and partial response that goes on. These
six costs are fitted, none below zero, to the stays that began with a step; an engine that keeps its KV caches shows a
`resumed` near zero of its own accord.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.rollout.step import Span

Floats = NDArray[np.float64]

COSTS = 6
PARTS = 8
"""Parts of a stay in which its context counts as constant."""


class EngineRates:
    """Seconds of engine time per unit of work.

    Args:
        half_life: steps after which an observation counts half.
    """

    def __init__(self, half_life: float = 6.0) -> None:
        self.decay = 0.5 ** (1.0 / half_life)
        self.costs = np.zeros(COSTS)
        """Seconds per decode step, token sampled, one above half the slots, token read, prompt token, resumed token."""
        self._normal = np.zeros((COSTS, COSTS))
        self._target = np.zeros(COSTS)

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
        clock = np.interp(first, until[by_time], np.maximum.accumulate(own[by_time]))
        enters = np.where(rows, 0.0, np.maximum(clock - first_tokens, 0.0))
        sampled = _integral(enters, enters + tokens, np.ones(len(begun)), own)
        crowded = crowded_tokens(enters, enters + tokens, slots, own)
        part = np.arange(PARTS)[:, None] / PARTS
        held = prompt_tokens + before + tokens * (part + 0.5 / PARTS)  # the context grows as it is read
        into, out = enters + tokens * part, enters + tokens * (part + 1 / PARTS)
        read = _integral(into.ravel(), out.ravel(), held.ravel(), own)
        new, old = np.where(before == 0, prompt_tokens, 0.0), np.where(before > 0, prompt_tokens + before, 0.0)
        by_turn = np.argsort(enters, kind="stable")
        upto = np.searchsorted(enters[by_turn], own, "right")
        prefilled = [np.concatenate(([0.0], np.cumsum(work[by_turn])))[upto] for work in (new, old)]
        work = np.stack([own, sampled, crowded, read, *prefilled], axis=1) / np.maximum(until, 1e-9)[:, None]
        self._normal = self.decay * self._normal + work.T @ work / len(work)
        self._target = self.decay * self._target + work.mean(0)
        self._fit()

    def _fit(self) -> None:
        """Least squares with no cost below zero. Where the data cannot tell, samples cost nothing up to half the slots,
        as while reading the weights takes longest, and prefill costs nothing."""
        normal, target = self._normal.copy(), self._target
        scale = np.sqrt(np.maximum(np.diag(normal), 1e-300))
        normal += np.diag(np.array([1e-6, 1e-3, 1e-6, 1e-6, 1e-6, 1e-6]) * scale**2)
        free = np.diag(self._normal) > 0
        while free.any():
            costs = np.zeros(COSTS)
            inner = np.ix_(free, free)
            costs[free] = np.linalg.solve(normal[inner] / np.outer(scale, scale)[inner], target[free] / scale[free])
            if (costs >= 0).all():
                self.costs = costs / scale
                return
            free[np.argmin(costs)] = False

    def state_dict(self) -> dict[str, Any]:
        return {"costs": self.costs.tolist(), "normal": self._normal.tolist(), "target": self._target.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.costs = np.array(state["costs"])
        self._normal, self._target = np.array(state["normal"]), np.array(state["target"])


def crowded_tokens(start: Floats, end: Floats, slots: int, at: Floats) -> Floats:
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
