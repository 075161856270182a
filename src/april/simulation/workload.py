"""Workloads: distributions of response lengths, and batch sizes.

Invariants:
- a sample's length depends only on its seed, its prompt and, if lengths drift, the policy version that continues it, so
  no schedule can change it unless lengths drift;
- a prompt's difficulty depends only on the workload's seed and the prompt's number.

Lengths are drawn through normal scores: a sample's score is sqrt(correlation) * (its prompt's score)
+ sqrt(1 - correlation) * (its own), and its length the quantile of the workload's distribution at that score (a
Gaussian copula). The distribution over all samples is thus the same for every correlation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from april.rollout.trajectory.prompt import Prompt

_SCORES = np.linspace(-6.0, 6.0, 4801)
_PHI = np.array([NormalDist().cdf(z) for z in _SCORES])


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a mixture of lognormal distributions.

    Args:
        median: median response length, in tokens.
        sigma: standard deviation of the logarithm of the length.
        weight: share of the samples.
    """

    median: float
    sigma: float
    weight: float = 1.0


@dataclass(frozen=True)
class Workload:
    """A distribution of response lengths, and the batch sizes of a step.

    Args:
        name: name of the workload.
        parts: mixture of lognormals from which lengths are drawn before truncation to `max_tokens`.
        max_tokens: response budget; longer responses are truncated there.
        correlation: correlation of the normal scores of two samples of one prompt, from 0 to 1.
        drift: relative growth of lengths with each policy version.
        prompt_tokens: median prompt length; prompts are lognormal with sigma 0.5 around it.
        rollout_batch_size: groups of a step (N).
        n_samples_per_prompt: samples of a group (G).
        seed: seed of the prompts' difficulties and lengths.
        observed: observed lengths, in ascending order, in place of a mixture.
    """

    name: str
    parts: tuple[Part, ...] = ()
    max_tokens: int = 16384
    correlation: float = 0.6
    drift: float = 0.0
    prompt_tokens: int = 200
    rollout_batch_size: int = 32
    n_samples_per_prompt: int = 8
    seed: int = 0
    observed: tuple[int, ...] = ()
    _zeros: tuple[int, ...] = field(default=(0,) * 8192, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.correlation <= 1:
            raise ValueError(f"correlation = {self.correlation}: must lie in [0, 1]")
        if self.max_tokens < 1 or bool(self.parts) == bool(self.observed):
            raise ValueError("a workload needs parts or observed lengths, and a response budget of at least one token")

    @cached_property
    def _quantiles(self) -> NDArray[np.float64]:
        """Logarithm of the length at each normal score, shape [4801]."""
        if self.observed:
            shares = (np.arange(len(self.observed)) + 0.5) / len(self.observed)
            seen: NDArray[np.float64] = np.interp(_PHI, shares, np.log(np.maximum(self.observed, 1)))
            return seen
        total = sum(part.weight for part in self.parts)
        logs = [(math.log(p.median), p.sigma, p.weight / total) for p in self.parts]
        if len(logs) == 1:
            alone: NDArray[np.float64] = logs[0][0] + logs[0][1] * _SCORES
            return alone
        low, high = min(m - 7 * s for m, s, _ in logs), max(m + 7 * s for m, s, _ in logs)
        grid = np.linspace(low, high, 20001)
        cdf = sum(w * np.interp((grid - m) / s, _SCORES, _PHI, 0.0, 1.0) for m, s, w in logs)
        # np.interp needs increasing abscissas: flat parts of the distribution function have no inverse.
        rising = np.concatenate(([True], np.diff(cdf) > 0))
        mixed: NDArray[np.float64] = np.interp(_PHI, cdf[rising], grid[rising])
        return mixed

    def lengths(
        self,
        prompts: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        version: int = 0,
    ) -> NDArray[np.int64]:
        """Return the true response length of each sample, from 1 to `max_tokens`, shape [n].

        Args:
            prompts: number of each sample's prompt, shape [n].
            seeds: each sample's seed, shape [n].
            version: version of the policy that samples it.
        """
        own, shared = normals(seeds), normals(_mix(prompts.astype(np.uint64), self.seed))
        scores = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * own
        exact: NDArray[np.float64] = np.exp(
            np.interp(scores, _SCORES, self._quantiles) + np.log1p(self.drift) * version
        )
        lengths: NDArray[np.int64] = np.clip(np.rint(exact), 1, self.max_tokens).astype(np.int64)
        return lengths

    def sample(self, n: int, seed: int = 0, version: int = 0) -> NDArray[np.int64]:
        """Return `n` lengths of samples of different prompts, drawn from the workload's distribution."""
        numbers = np.arange(n, dtype=np.int64)
        return self.lengths(numbers, _mix(numbers.astype(np.uint64), seed + 1), version)

    def prompts(self) -> Iterator[Prompt]:
        """Yield prompts without end. The first token of a prompt is its number, by which an engine identifies it."""
        for start in itertools.count(0, 1024):
            scores = normals(_mix(np.arange(start, start + 1024, dtype=np.uint64), self.seed + 2))
            lengths = np.clip(self.prompt_tokens * np.exp(0.5 * scores), 1, 8192).astype(int)
            for number, length in enumerate(lengths.tolist(), start):
                yield Prompt((number, *self._zeros[: length - 1]), str(number))


def _mix(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = values + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def normals(seeds: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a standard normal number for each seed (Box and Muller), shape of `seeds`."""
    # 53 bits, and half a unit so that the logarithm's argument is never 0.
    first, second = (((_mix(seeds, k) >> np.uint64(11)) + 0.5) * 2.0**-53 for k in (11, 12))
    normal: NDArray[np.float64] = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return normal


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("light", (Part(2000, 0.3),), correlation=0.5),
        Workload("lognormal", (Part(2000, 0.9),)),
        Workload("heavy", (Part(1200, 1.3),)),
        Workload("bimodal", (Part(800, 0.4, 0.75), Part(8000, 0.35, 0.25))),
        Workload("truncated", (Part(6000, 1.0),)),
        Workload("drifting", (Part(1000, 0.9),), drift=0.02),
        Workload("small-batch", (Part(2000, 0.9),), rollout_batch_size=8),
        Workload("group-correlated", (Part(2000, 0.9),), correlation=0.95),
    )
}
"""light: little to gain. lognormal: p99 is 8 medians. heavy: p99 is 20 medians, truncated at 14. bimodal: a quarter of
the samples is 10 times longer. truncated: one in six responses reaches the budget. drifting: lengths double in 35
versions. small-batch: 8 prompts per step. group-correlated: all samples of a prompt have similar lengths."""
