"""Which tokens top-k, top-p and min-p leave to be drawn.

Engines record the log-probability of a token under the distribution it was drawn from. With a truncated one the trainer
has to score tokens under what the same rule leaves of its own distribution: then the ratio of a fresh token is 1, and
only what has really moved counts as stale.

Invariant: the most probable token is always left, and so is every token that is said to have been drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1e4
"""How far below the highest a logit makes a token impossible: its probability, and that times its logarithm, are 0."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """top_k, then top_p of what that leaves, then min_p, as in `SamplingParams`."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __bool__(self) -> bool:
        """Whether anything is cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def apply(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """`logits` with those that cannot be drawn set far below the others.

        Args:
            logits: already divided by the temperature, [N, V].
            drawn: token ids that were drawn, [N]; they are left even where the rule has come to cut them off.
        """
        kept = self._kept(logits).scatter_(1, drawn[:, None], True)
        return torch.where(kept, logits, logits.amax(-1, keepdim=True) + NEVER)

    def _kept(self, logits: Tensor) -> Tensor:
        values, index = logits.sort(dim=-1, descending=True, stable=True)
        values = values - values[:, :1]
        left = torch.ones_like(values, dtype=torch.bool)
        if self.top_k:
            left[:, self.top_k :] = False
        if self.top_p < 1:
            probabilities = values.masked_fill(~left, -math.inf).double().softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            left &= before < self.top_p
            left[:, 0] = True
        if self.min_p > 0:
            left &= values >= math.log(self.min_p)
        return torch.zeros_like(left).scatter_(1, index, left)


WHOLE = Truncation()
