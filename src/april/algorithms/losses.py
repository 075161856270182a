"""Policy losses per token, and their aggregation to one number.

Every policy loss has the same first four parameters:
    logp        log π_θ of each token, [B, T], with gradient;
    old_logp    log π_old of each token, [B, T]: the denominator of the ratio, chosen by `corrections.correct`;
    advantages  [B], or [B, T] for one per token; treated as constants;
    mask        True for trained policy tokens, [B, T];
and returns a `PolicyLoss`. Losses are minimised.

Invariants:
- outside the mask every loss is 0 and no gradient flows, for any padding, NaN included;
- a batch without a trained token has loss 0 and zero gradients;
- with global denominators, `aggregate` over micro-batches sums to the loss of the whole batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from april.algorithms.ratios import at_least_float32, bounded_exp, log_ratio, sequence_mean

Aggregation = Literal["token-mean", "sequence-mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]


class PolicyLoss(NamedTuple):
    loss: Tensor
    """Loss of each token, [B, T]; 0 outside the mask."""
    clipped: Tensor
    """True where clipping took effect on a trained token, [B, T]."""
    ratio: Tensor
    """The importance ratio of each token, before clipping and without gradient, [B, T]; 1 outside the mask."""


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A). PPO, arXiv 1707.06347, equation 7; two bounds: DAPO,
    arXiv 2503.14476, equation 8.

    Args:
        dual_clip: c of the bound -c A on the loss for A < 0 (arXiv 1912.09729, equation 5: c = 3); None for no bound.
    """
    ratio = bounded_exp(log_ratio(logp, old_logp, mask))
    return _clipped(ratio, _per_token(advantages, mask, ratio.dtype), mask, eps_low, eps_high, dual_clip)


def gspo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> PolicyLoss:
    """-min(s A, clip(s, 1 - ε_low, 1 + ε_high) A) with the sequence's ratio s = exp(mean log r) on each of its tokens.

    GSPO, arXiv 2507.18071, equations 5 and 7. Aggregate with "sequence-mean". The clip range is far narrower than a
    token's, since s is a geometric mean.

    Raises:
        ValueError: advantages are not [B] (`gspo_token` takes one per token).
    """
    if advantages.dim() != 1:
        raise ValueError(f"gspo needs one advantage per sequence, got shape {list(advantages.shape)}: use gspo_token")
    ratio = bounded_exp(sequence_mean(log_ratio(logp, old_logp, mask), mask))[:, None]
    # Tokens outside the mask have ratio 1, as in the other losses.
    ratio = torch.where(mask, ratio, ratio.new_ones(()))
    return _clipped(ratio, _per_token(advantages, mask, ratio.dtype), mask, eps_low, eps_high)


def gspo_token(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> PolicyLoss:
    """GSPO with one advantage per token: s_t = sg[s] · π_θ / sg[π_θ]. arXiv 2507.18071, equations 13 and 14.

    Same value as `gspo`, and same gradient where a sequence's advantages are all equal.
    """
    with torch.no_grad():
        sequence = bounded_exp(sequence_mean(log_ratio(logp, old_logp, mask), mask))[:, None]
    # 1 in value, with the gradient of log π_θ.
    one = log_ratio(logp, logp.detach(), mask).exp()
    ratio = torch.where(mask, sequence * one, one)
    return _clipped(ratio, _per_token(advantages, mask, ratio.dtype), mask, eps_low, eps_high)


def cispo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = float("inf"),
    eps_high: float = 4.0,
) -> PolicyLoss:
    """-sg[clip(r, 1 - ε_low, 1 + ε_high)] A log π_θ. CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

    Clipping bounds the weight of a token's gradient and never drops the token. The paper has no lower bound and does
    not publish ε_high: 4 (ratios up to 5) is ScaleRL's recommendation (arXiv 2510.13786).
    """
    ratio = bounded_exp(log_ratio(logp.detach(), old_logp, mask))
    weight = ratio.clamp(1 - eps_low, 1 + eps_high)
    held = at_least_float32(logp).masked_fill(~mask, 0.0)
    loss = -weight * _per_token(advantages, mask, ratio.dtype) * held
    return PolicyLoss(loss, (weight != ratio) & mask, ratio)


def kl(logp: Tensor, ref_logp: Tensor, mask: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate KL(π_θ ‖ π_ref) from each sampled token, [B, T], with gradient to `logp`; 0 outside the mask.

    k1 = log π_θ/π_ref, k2 = k1²/2, k3 = e^{-k1} - 1 + k1 (Schulman, "Approximating KL divergence", 2020; k3 is
    GRPO's, arXiv 2402.03300, equation 4). Use k2 or k3 in a loss and k1 in the reward: the expected gradient of k1
    is 0.
    """
    k1 = log_ratio(logp, ref_logp, mask)
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return 0.5 * k1.square()
    if estimator == "k3":
        return bounded_exp(-k1) - 1 + k1
    raise ValueError(f"estimator = {estimator!r}: must be k1, k2 or k3")


def entropy_bonus(entropy: Tensor, mask: Tensor) -> Tensor:
    """Entropy loss, -H of each token, [B, T] -> [B, T]; add it with a small coefficient."""
    return -at_least_float32(entropy).masked_fill(~mask, 0.0)


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, eps: float = 0.2) -> Tensor:
    """max((V - R)², (V_old + clip(V - V_old, ±ε) - R)²) / 2 of each token, [B, T]: PPO's loss of the value head.

    PPO implementations use this clipped form (arXiv 2005.12729, section 3). `eps=inf` gives the squared error.
    """
    values, old_values, returns = (
        at_least_float32(x).masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach())
    )
    near = old_values + (values - old_values).clamp(-eps, eps)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Aggregate token losses to one number.

    - "token-mean": sum over trained tokens / number of trained tokens (DAPO, arXiv 2503.14476, equation 8);
    - "sequence-mean": mean over each sequence's trained tokens, summed / number of sequences (GRPO, arXiv 2402.03300,
      equation 3); a sequence without a trained token counts as 0; an episode of several sequences is one sequence;
    - "constant": sum over trained tokens / `denominator` (Dr. GRPO, arXiv 2503.20783: sequences × response budget).

    For gradient accumulation pass the denominator of the *whole* batch (trained tokens; sequences; sequences × budget):
    the results of micro-batches of any size then add up to the loss of the whole batch.

    Args:
        loss: loss of each token, [B, T].
        mask: True for trained policy tokens, [B, T].
        denominator: divisor; computed from `mask` if None, except for "constant", which requires it.
        shares: share of each row in the trained tokens of its episode, [B]; None: each row is an episode.
    """
    held = loss.masked_fill(~mask, 0.0)
    if mode == "token-mean":
        total, own = held.sum(), mask.sum()
    elif mode == "sequence-mean":
        means = sequence_mean(held, mask)
        total = (means if shares is None else means * shares).sum()
        own = torch.tensor(len(mask), device=mask.device) if shares is None else shares.sum()
    elif mode == "constant":
        if denominator is None:
            raise ValueError('aggregation "constant" needs a denominator: sequences in the batch × response budget')
        total, own = held.sum(), mask.sum()
    else:
        raise ValueError(f'aggregation = {mode!r}: must be "token-mean", "sequence-mean" or "constant"')
    if denominator is None:
        return total / own.clamp(min=1)
    return total / torch.as_tensor(denominator, device=total.device, dtype=total.dtype).clamp(min=1)


def _per_token(advantages: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return advantages as [B, T] without gradient, 0 outside the mask."""
    held = advantages.detach().to(dtype)
    if held.dim() == 1:
        held = held[:, None]
    # `where` instead of a product, because 0 · NaN of padding would be NaN.
    return torch.where(mask, held, held.new_zeros(()))


def _clipped(
    ratio: Tensor, advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    plain = ratio * advantages
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    objective = torch.minimum(plain, bounded)
    # Clipping has effect only where the bound lowers the objective: min() ignores it on the other side.
    clipped = bounded < plain
    if dual_clip is not None:
        floor = dual_clip * advantages
        too_low = (advantages < 0) & (objective < floor)
        objective = torch.where(too_low, floor, objective)
        clipped = clipped | too_low
    return PolicyLoss(-objective, clipped & mask, ratio.detach())


LOSSES = {"ppo_clip": ppo_clip, "gspo": gspo, "gspo_token": gspo_token, "cispo": cispo}
"""Policy losses by their names in the catalogue."""
