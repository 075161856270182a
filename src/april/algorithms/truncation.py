"""Truncation of distributions by top-k, top-p and min-p.

Engines record the log-probability of a token under the distribution it was drawn from. If that was truncated, the
trainer must truncate its own distribution by the same rule: then the ratio of an on-policy token is 1.

Invariant: truncation keeps the most probable token and every token that was drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1e4
"""Logit of a removed token, relative to the highest: its p and p · log p are 0 in float32."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """top_k, then top_p of the remaining tokens, then min_p, as in `SamplingParams`."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __bool__(self) -> bool:
        """Whether any token can be removed."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def apply(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Return `logits` with the values of removed tokens set far below the highest.

        Args:
            logits: logits divided by the temperature, [N, V].
            drawn: token ids that were drawn, [N]; they are kept even if the policy has changed so that the rule would
                now remove them.
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
            # In float64: a cumulative sum over a large vocabulary in float32 could move the boundary by tokens.
            probabilities = values.masked_fill(~left, -math.inf).double().softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            left &= before < self.top_p
            # With top_p = 0 the comparison above removes even the most probable token.
            left[:, 0] = True
        if self.min_p > 0:
            left &= values >= math.log(self.min_p)
        return torch.zeros_like(left).scatter_(1, index, left)


WHOLE = Truncation()
