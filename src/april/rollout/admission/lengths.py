"""Distribution of response lengths, learned while most responses are still unfinished.

An interrupted response is censored: only a lower bound of its length is known, and leaving it out would underestimate
the tail. The estimate is a life table, the product-limit estimator of Kaplan and Meier (1958) on bins of length, with
delayed entry: in each step, a response is at risk from its length at the start of the step to its length at the end. So
the estimate reflects the current policy at each length, whichever version started the response. Older steps are
forgotten at a constant rate, so the estimate follows drift.

Lengths within a group are correlated. The correlation refers to normal scores (a Gaussian copula with the same
correlation for every pair), and is estimated from groups that were trained on. This choice is not biased, as every
group is trained on in the end.

Invariant: survival starts at 1, never increases, and ends at the budget: no response is longer than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from april.rollout.admission.slot_intervals import Floats

BINS = 256
"""Largest number of bins of length. They are spaced geometrically, and none is narrower than one token."""
_SCORES = np.linspace(-6.0, 6.0, 2401)
_PHI = np.array([NormalDist().cdf(z) for z in _SCORES])


def _interpolate(x: Floats, at: Floats, values: Floats) -> Floats:
    found: Floats = np.interp(x, at, values)
    return found


def _cdf(scores: Floats) -> Floats:
    """Return the standard normal distribution function."""
    return _interpolate(scores, _SCORES, _PHI)


def _score(probability: Floats) -> Floats:
    """Return the inverse of `_cdf`, within six standard deviations."""
    return _interpolate(probability, _PHI, _SCORES)


def _normal_scores(groups: int, size: int, even: int, rng: np.random.Generator) -> Floats:
    """Return normal scores, shape [groups, size]. Any `even` consecutive groups have one score in each of
    `even * size` equally likely ranges."""
    blocks, ranges = -(-groups // even), even * size
    order = rng.permuted(np.tile(np.arange(ranges), (blocks, 1)), axis=1)
    return _score((order + rng.random(order.shape)) / ranges).reshape(-1, size)[:groups]


class LengthModel:
    """The distribution of response lengths under the current policy.

    Args:
        max_tokens: response budget, to which longer responses are truncated.
        half_life: steps after which an observation counts half.
    """

    def __init__(self, max_tokens: int, half_life: float = 6.0) -> None:
        self.max_tokens = max_tokens
        self.decay = 0.5 ** (1.0 / half_life)
        inner = np.geomspace(1, max_tokens + 1, BINS + 1) - 1
        self.edges = np.unique(np.round(inner)).astype(float)
        """Ends of the bins, shape [bins + 1]: a length x is in bin k if edges[k] < x <= edges[k + 1]."""
        self._places = np.arange(len(self.edges), dtype=float)
        self.at_risk = np.zeros(len(self.edges) - 1)
        """Responses that passed through each bin, discounted; in fractions of a bin where they entered or left it."""
        self.finished = np.zeros(len(self.edges) - 1)
        """Responses that finished in each bin, discounted."""
        self.pairs = np.array([0.5, 1.0])
        """Sums of products of two normal scores of one group, and of squares; the prior is 0.5 with the weight of one
        group."""

    @classmethod
    def for_batch(cls, max_tokens: int, samples: int) -> LengthModel:
        """Return a model with a half-life of six steps of `samples` responses, or more if these are too few."""
        return cls(max_tokens, half_life=max(6.0, 1500 / max(samples, 1)))

    def observe(self, before: ArrayLike, after: ArrayLike, finished: ArrayLike) -> None:
        """Learn from the responses that were in the engine in one step, each argument of shape [n].

        Args:
            before: length of the response at the start of the step.
            after: length at the end of the step, or when the response finished.
            finished: whether the response finished.
        """
        start, end, done = self._within_budget(before), self._within_budget(after), np.asarray(finished, bool)
        bin_of = np.maximum(np.searchsorted(self.edges, end, "left") - 1, 0)  # an empty response is in the first
        # A response that the budget truncated is censored. A response that stopped was at risk in the whole of its bin.
        stopped = done & (end < self.max_tokens)
        left = np.where(stopped, self._places[1:][bin_of], self._place(end))
        self.at_risk = self.decay * self.at_risk + self._passed(left) - self._passed(self._place(start))
        self.finished = self.decay * self.finished
        np.add.at(self.finished, bin_of[stopped], 1.0)

    def observe_groups(self, lengths: ArrayLike) -> None:
        """Learn from the lengths of complete groups, shape [groups, samples in a group]."""
        values = np.asarray(lengths, float)
        size = values.shape[1]
        if size < 2:
            return
        scores = _score(self.cumulative(values))
        squares = (scores**2).sum(1) / size
        # Mean product over all pairs: the square of a sum is the sum of squares and of the products of pairs.
        products = (scores.sum(1) ** 2 - (scores**2).sum(1)) / (size * (size - 1))
        self.pairs = self.decay * self.pairs + [products.sum(), squares.sum()]

    @property
    def correlation(self) -> float:
        """Correlation of two normal scores of one group, in [0, 0.99]."""
        return float(np.clip(self.pairs[0] / max(self.pairs[1], 1e-9), 0.0, 0.99))

    @property
    def survival(self) -> Floats:
        """Share of responses longer than each of `edges`, shape [bins + 1]; the last is the truncated share.

        The prior, with the weight of half a response, is a tail that falls like 1/x.
        """
        scale = self.max_tokens / 8
        prior = 1 - (self.edges[:-1] + scale) / (self.edges[1:] + scale)
        hazard = (self.finished + 0.5 * prior) / np.maximum(self.at_risk + 0.5, 1e-9)
        return np.concatenate(([1.0], np.cumprod(1 - np.clip(hazard, 0.0, 1.0))))

    @property
    def mean(self) -> float:
        """Expected response length."""
        survival = self.survival
        return float((np.diff(self.edges) * (survival[1:] + survival[:-1]) / 2).sum())

    def cumulative(self, lengths: ArrayLike) -> Floats:
        """Return the share of responses of at most these lengths; for truncated ones the middle of the jump."""
        values, survival = np.asarray(lengths, float), self.survival
        below = 1 - _interpolate(values, self.edges, survival)
        return np.where(values >= self.max_tokens, 1 - survival[-1] / 2, below)

    def quantile(self, probabilities: ArrayLike) -> Floats:
        """Return the lengths below which these shares of the responses lie."""
        survival = self.survival
        # interp needs strictly increasing values; where survival is constant, any length is a valid quantile.
        falling = np.maximum.accumulate(1 - survival) + 1e-12 * self._places
        return _interpolate(np.asarray(probabilities, float), falling, self.edges)

    def draw(self, groups: int, group_size: int, rng: np.random.Generator, even: int) -> Floats:
        """Draw lengths of new groups, shape [groups, group_size], whole tokens from 1 to the budget.

        Args:
            even: number of consecutive groups that cover the distribution evenly (stratified sampling), so that any
                long run of groups has nearly the mean and the tail of the whole. It should be large, because samples of
                one group are never in the same range.
        """
        shared, own = _normal_scores(groups, 1, even, rng), _normal_scores(groups, group_size, even, rng)
        # One-factor Gaussian copula: any two scores of a group have this correlation, and each has variance 1.
        scores = np.sqrt(self.correlation) * shared + np.sqrt(1 - self.correlation) * own
        lengths: Floats = np.clip(np.ceil(self.quantile(_cdf(scores))), 1, self.max_tokens)
        return lengths

    def _within_budget(self, lengths: ArrayLike) -> Floats:
        """Return lengths truncated to the budget: responses may have been started with a larger one."""
        shortened: Floats = np.minimum(np.asarray(lengths, float), self.max_tokens)
        return shortened

    def _place(self, lengths: Floats) -> Floats:
        """Return lengths in units of bins."""
        return _interpolate(lengths, self.edges, self._places)

    def _passed(self, places: Floats) -> Floats:
        """Return how many responses passed through each bin on the way to these places, in fractions of a bin."""
        whole = np.minimum(places.astype(int), len(self.at_risk))
        beyond = np.cumsum(np.bincount(whole, minlength=len(self.at_risk) + 1)).astype(float)
        within = np.bincount(whole, weights=places - whole, minlength=len(self.at_risk) + 1)
        passed: Floats = float(len(places)) - beyond[:-1] + within[:-1]
        return passed

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in ("edges", "at_risk", "finished", "pairs")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. If the response budget differs, lengths are learned from scratch."""
        saved = {name: np.array(state[name], dtype=float) for name in ("edges", "at_risk", "finished", "pairs")}
        self.pairs = saved["pairs"]
        if np.array_equal(saved["edges"], self.edges):
            self.at_risk, self.finished = saved["at_risk"], saved["finished"]
