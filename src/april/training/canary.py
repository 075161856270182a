"""Canary of a weight update: a few fixed tokens that every replica scores, compared with the trainer's scores.

A server accepts any label for its weights, so the label does not show that the weights arrived. A
replica whose log-probabilities differ from the trainer's computes another policy: its weights were lost while it slept,
or were updated in part.

Invariants:
- a replica gets work only if its mean difference from the trainer is within the band, or if it is the same after the
  replica was given the weights again, and no gross difference;
- the band follows the differences of replicas that were verified lately, and is kept over a resumption;
- a replica whose scores did not follow the trainer's gets the weights again, however small the updates were.

The mean decides about the band, because rounding and other experts of a mixture change single tokens by a lot. Updates
that change log-probabilities by less than the band, as steps at a small learning rate do, are found by the change of a
replica's scores since an update is known to have arrived: it equals the change of the trainer's, to which a constant
difference of their arithmetic adds nothing. As long as rounding hides the change, it is measured over more updates.
Rounding changes the trainer's scores as well as the replica's, by other amounts. So scores of a replica that changed
without following the trainer's show a missing update only if they changed by much less.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from operator import mul
from pathlib import Path
from statistics import fmean, median_low

import torch

from april.disk import write_whole
from april.engines.replica import Scorer
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)

FILE_NAME = "canary.json"
SEQUENCES, LENGTH = 4, 16
SLACK = 4.0
"""Width of the band, as a multiple of the median of recent differences."""
RECENT = 8
"""Number of verified differences that the band follows."""
LEAST_BAND, LEAST_BAND_ROUNDED = 0.05, 0.3
"""Least width of the band in nats, with float32 and with 16-bit types."""
SURE = 4.0
"""Number of standard errors by which the share of a change must differ from one half to show that it arrived or not."""
GROSS = 2.0
"""Mean difference in nats beyond which engine and trainer compute different policies, whatever their arithmetic."""

Scores = Sequence[Sequence[float]]
"""Log-probability of each token after the first, by sequence."""


def canary_tokens(vocabulary: int) -> list[list[int]]:
    """Return the fixed sequences of token ids, spread over a vocabulary."""
    return [[(7 + 7919 * i + 104729 * k) % vocabulary for i in range(LENGTH)] for k in range(SEQUENCES)]


def least_band(compute_dtype: torch.dtype) -> float:
    """Return the least width of the band for engines and trainers that compute in a type."""
    return LEAST_BAND if compute_dtype.itemsize > 2 else LEAST_BAND_ROUNDED


class Canary:
    """Compares replicas with the trainer.

    Args:
        tokens: sequences that are scored.
        directory: the run's directory, where recent differences are kept.
        resumed: whether the trainer's policy is no longer the one that engines load when they start.
        least: least width of the band in nats.
    """

    def __init__(
        self, tokens: Sequence[Sequence[int]], directory: Path, resumed: bool = False, least: float = LEAST_BAND
    ) -> None:
        self.tokens = tokens
        self.resumed = resumed
        self.expected: Scores = ()
        """Scores of the trainer's current policy."""
        self.gaps: dict[str, float] = {}
        """Latest difference of each replica, by name."""
        self._least = least
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._arrived: dict[str, tuple[Scores, Scores]] = {}
        """Scores of each replica and of the trainer at the last update that is known to have arrived."""
        self._doubted: set[str] = set()
        """Replicas that differed by more than the band when they were last scored."""
        self._path = directory / FILE_NAME
        if resumed and self._path.exists():
            self._recent.extend(json.loads(self._path.read_text())["gaps"])

    @property
    def band(self) -> float | None:
        """Largest mean difference in nats that is not doubted; None before the first measurement."""
        return min(max(self._least, SLACK * median_low(self._recent)), GROSS) if self._recent else None

    async def scores(self, replica: Scorer) -> Scores:
        """Return a replica's scores."""
        return [await replica.prompt_logprobs(sequence) for sequence in self.tokens]

    def set_band(self, found: Sequence[Scores]) -> None:
        """Set the band from the scores of replicas that hold the same weights as the trainer.

        Raises:
            EngineError: the replicas do not compute the trainer's policy.
        """
        if not found:  # all replicas have died since: the next turn sets the band
            return
        gap = max(mean_gap(scores, self.expected) for scores in found)
        if not gap <= GROSS:
            raise EngineError(
                f"before any update, log-probabilities of the engine differ from the trainer's by {gap:.3g} nats in "
                "the mean: they compute different policies; compare model.path, model.compute_dtype and "
                "engine.server_args"
            )
        self._record(gap)

    async def verify(self, replica: Scorer) -> None:
        """Check a replica that holds the trainer's current weights.

        Raises:
            EngineError: it does not answer, or seems to compute another policy: it has to get the weights again. A
                difference that stays after that, and is not gross, is logged and accepted.
        """
        found = await self.scores(replica)
        gap = mean_gap(found, self.expected)
        self.gaps[replica.name] = gap
        if self.band is None:
            return
        finite = math.isfinite(gap)
        own, trainer = self._changes(replica.name, found) if finite else ([], [])
        share, error = followed(own, trainer)
        problem = None
        if not gap <= self.band:
            problem = (
                f"{replica.name} computes another policy than the trainer after the weight update: log-probabilities "
                f"of the canary differ by {gap:.3g} nats in the mean, where {self.band:.3g} are allowed"
            )
        elif share + SURE * error < 0.5 and math.hypot(*own) < math.hypot(*trainer) / 2:
            problem = (
                f"the weight update did not reach {replica.name}: its log-probabilities of the canary changed by "
                f"{share:.0%} of what the trainer's changed by"
            )
        if problem is not None:
            if not gap <= GROSS or replica.name not in self._doubted:
                self._doubted.add(replica.name)
                raise EngineError(problem)
            log.warning("%s; it stays after a second update, and is accepted: watch kl_behaviour", problem)
        self._doubted.discard(replica.name)
        if problem is not None or replica.name not in self._arrived or share - SURE * error > 0.5:
            self._arrived[replica.name] = found, self.expected
        self._record(gap)

    def _changes(self, name: str, found: Scores) -> tuple[list[float], list[float]]:
        """Return the changes of a replica's and of the trainer's scores since an update is known to have arrived; none
        before a first one is."""
        if name not in self._arrived:
            return [], []
        own, trainer = self._arrived[name]
        return _differences(found, own), _differences(self.expected, trainer)

    def _record(self, gap: float) -> None:
        before = self.band
        self._recent.append(gap)
        if self.band != before:
            write_whole(self._path, json.dumps({"gaps": list(self._recent), "band": self.band}))


def followed(own: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the regression of `own` on `other` through the origin, and its standard error: the share of
    the changes `other` that `own` made too; 1 and infinity if `other` is empty or zero."""
    square = sum(change * change for change in other)
    if square == 0:
        return 1.0, math.inf
    slope = sum(map(mul, own, other)) / square
    residual = sum((change - slope * expected) ** 2 for change, expected in zip(own, other, strict=True))
    return slope, math.sqrt(residual / (len(own) - 1) / square)


def mean_gap(found: Scores, expected: Scores) -> float:
    """Return the mean difference of two scores in nats; infinity if one is not finite."""
    gaps = [abs(difference) for difference in _differences(found, expected)]
    return fmean(gaps) if all(map(math.isfinite, gaps)) else math.inf


def _differences(found: Scores, expected: Scores) -> list[float]:
    """Return the differences of all tokens' scores."""
    return [a - b for own, other in zip(found, expected, strict=True) for a, b in zip(own, other, strict=True)]
