"""Canary of a weight update: a few fixed tokens that every replica scores, compared with the trainer's scores.

A server accepts any label for its weights, so the label does not show that the weights arrived. A
replica whose log-probabilities differ from the trainer's computes another policy: its weights were lost while it slept,
or were updated in part.

Invariants:
- a replica gets work only if its largest difference from the trainer is within the band;
- the band is measured once in a run, before the first update, and is the same after a resumption.

The canary finds weights that are wrong. An update that changes log-probabilities by less than the band, as one step at
a small learning rate does, passes whether it has arrived or not.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from april.disk import write_whole
from april.engines.replica import Scorer
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)

FILE_NAME = "canary.json"
SEQUENCES, LENGTH = 4, 16
SLACK = 4.0
"""Width of the band, as a multiple of the difference before the first update."""
LEAST_BAND = 0.02
"""Least width of the band in nats."""
LARGEST_BAND = 4.0
"""Width in nats beyond which engine and trainer compute different policies from the start."""

Scores = Sequence[Sequence[float]]
"""Log-probability of each token after the first, by sequence."""


def canary_tokens(vocabulary: int) -> list[list[int]]:
    """Return the fixed sequences of token ids, spread over a vocabulary."""
    return [[(7 + 7919 * i + 104729 * k) % vocabulary for i in range(LENGTH)] for k in range(SEQUENCES)]


class Canary:
    """Compares replicas with the trainer.

    Args:
        tokens: sequences that are scored.
        directory: the run's directory, where the band is kept.
        resumed: whether the trainer's policy is no longer the one that engines load when they start.
    """

    def __init__(self, tokens: Sequence[Sequence[int]], directory: Path, resumed: bool = False) -> None:
        self.tokens = tokens
        self.resumed = resumed
        self.band: float | None = None
        self.expected: Scores = ()
        """Scores of the trainer's current policy."""
        self.gaps: dict[str, float] = {}
        """Latest difference of each replica, by name."""
        self._path = directory / FILE_NAME
        if resumed and self._path.exists():
            self.band = float(json.loads(self._path.read_text())["band"])

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
        gap = max(largest_gap(scores, self.expected) for scores in found)
        self.band = max(LEAST_BAND, SLACK * gap)
        if not self.band <= LARGEST_BAND:
            raise EngineError(
                f"before any update, log-probabilities of the engine differ from the trainer's by {gap:.3g} nats: they "
                "compute different policies; compare model.path, model.compute_dtype and engine.server_args"
            )
        write_whole(self._path, json.dumps({"gap": gap, "band": self.band}))

    async def verify(self, replica: Scorer) -> None:
        """Check a replica that holds the trainer's current weights.

        Raises:
            EngineError: it computes another policy, or does not answer.
        """
        gap = largest_gap(await self.scores(replica), self.expected)
        self.gaps[replica.name] = gap
        if self.band is None:
            return
        if not gap <= self.band:
            raise EngineError(
                f"{replica.name} computes another policy than the trainer after the weight update: log-probabilities "
                f"of the canary differ by {gap:.3g} nats, where {self.band:.3g} are allowed"
            )


def largest_gap(found: Scores, expected: Scores) -> float:
    """Return the largest difference of two scores in nats; infinity if one is not finite."""
    pairs = [pair for own, other in zip(found, expected, strict=True) for pair in zip(own, other, strict=True)]
    gaps = [abs(own - other) for own, other in pairs]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf
