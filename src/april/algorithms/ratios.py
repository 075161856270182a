"""Probability ratios between two policies, per token.

Invariants:
- positions outside the mask have no effect, for any values there: their log-ratio is 0 and they get no gradient;
- half-precision inputs are computed in float32;
- every ratio and its gradient is finite for any finite log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Ratios are exact up to e^20 (4.9e8) and continue along the tangent above it, which keeps values finite and gradients
of the right sign where the exponential would overflow. The clips, caps and windows of published methods are below."""


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32; unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Return log(π_a/π_b) of each token, 0 outside the mask.

    Args:
        numerator: log π_a of each token, [B, T].
        denominator: log π_b of each token, [B, T].
        mask: True for trained policy tokens, [B, T].
    """
    return (at_least_float32(numerator) - at_least_float32(denominator)).masked_fill(~mask, 0.0)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), continued along its tangent above `LOG_RATIO_LIMIT`."""
    return x.clamp(max=LOG_RATIO_LIMIT).exp() * (1 + (x - LOG_RATIO_LIMIT).clamp(min=0))


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each sequence's trained tokens, [B, T] -> [B]; 0 for a sequence without trained tokens."""
    return x.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
