"""Advantage estimators.

Group estimators take rewards of shape [groups, samples], or flat [n] with `group_ids` [n] (any integers, in any
order) if groups differ in size, and return advantages of the same shape.

Invariants:
- equal rewards have advantage exactly 0, not a rounding error amplified by a vanishing deviation;
- a group of one sample has no baseline, so its advantage is 0 (only `reinforce_plus_plus` needs no group);
- advantages do not depend on the order of samples or groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from april.algorithms.ratios import at_least_float32


def grpo(rewards: Tensor, group_ids: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(R - mean) / (std + eps) within each group, with the sample standard deviation (divisor G - 1).

    DeepSeekMath, arXiv 2402.03300, section 4.1.2. The paper has no eps; implementations use 1e-8 to 1e-4.
    """
    centred, ids, counts = _centre(rewards, group_ids)
    variance = _group_sum(centred.square(), ids, counts) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt()[ids] + eps)).view_as(rewards)


def dr_grpo(rewards: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """R - mean within each group. Dr. GRPO, arXiv 2503.20783, section 3.2: no division by the deviation, which
    would favour prompts that are nearly always or nearly never solved. Use it with a constant divisor of the loss."""
    centred, _, _ = _centre(rewards, group_ids)
    return centred.view_as(rewards)


def rloo(rewards: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """R minus the mean of the group's other samples. RLOO, arXiv 2402.14740, equation 7."""
    centred, ids, counts = _centre(rewards, group_ids)
    # R - (sum - R)/(G - 1) = (R - mean) * G/(G - 1)
    return (centred * (counts / (counts - 1).clamp(min=1))[ids]).view_as(rewards)


def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """R - mean within each group, divided by the batch's standard deviation of these differences.

    REINFORCE++ with baseline, arXiv 2501.03262, section 3.3. Needs the whole batch, not a micro-batch. The batch mean
    of centred rewards is 0, so whitening is the division alone.
    """
    centred, _, _ = _centre(rewards, group_ids)
    return (centred / (_deviation(centred) + eps)).view_as(rewards)


def reinforce_plus_plus(rewards: Tensor, group_ids: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """(R - mean) / (std + eps) over the whole batch. REINFORCE++, arXiv 2501.03262, section 3.2.

    `group_ids` is ignored; it is a parameter so that all estimators have one signature. The published method includes
    a KL penalty on each token's reward: see `reinforce_plus_plus_per_token`.
    """
    flat = at_least_float32(rewards).flatten()
    if not len(flat):
        return flat.view_as(rewards)
    centred = _centre_all(flat)
    return (centred / (_deviation(centred) + eps)).view_as(rewards)


def reinforce_plus_plus_per_token(
    rewards: Tensor, mask: Tensor, penalty: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """REINFORCE++ with KL penalty: A_t = R - sum of the penalties from t on, whitened over the batch's tokens.

    arXiv 2501.03262, section 3.2 (discount 1). Needs the whole batch, not a micro-batch.

    Args:
        rewards: reward of each sample, [B].
        mask: True for trained policy tokens, [B, T].
        penalty: β · k1 of each token against the reference policy, [B, T], without gradient; None for no penalty.

    Returns:
        [B, T], 0 outside the mask.
    """
    to_go = at_least_float32(rewards)[:, None].expand(mask.shape)
    if penalty is not None:
        held = at_least_float32(penalty.detach()).masked_fill(~mask, 0.0)
        to_go = to_go - held.flip(-1).cumsum(-1).flip(-1)
    return whiten(to_go, mask, eps)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) over the trained tokens of the batch, [B, T] -> [B, T]; 0 outside the mask.

    PPO for language models whitens the result of `gae` in this way (arXiv 1909.08593).
    """
    result = torch.zeros_like(at_least_float32(x))
    if mask.any():
        centred = _centre_all(at_least_float32(x)[mask])
        result[mask] = centred / (_deviation(centred) + eps)
    return result


def outcome_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each sample's reward on its last trained token, [B] and mask [B, T] -> [B, T]; 0 for an empty response."""
    # Counted from the end, the last trained token is number 1.
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return at_least_float32(rewards)[:, None] * last


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. arXiv 1506.02438, equation 16:
    A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} - V_t.

    Tokens outside the mask (padding, environment turns) are skipped: the state after a trained token is the next
    trained token, without discount or reward in between.

    Args:
        rewards: reward of each token, [B, T] (`outcome_rewards` for one reward per sample).
        values: value head's estimate before each token, [B, T].
        mask: True for trained policy tokens, [B, T].
        bootstrap: value of the state after the last token, [B], for truncated responses; 0 (terminal) if None.

    Returns:
        advantages [B, T] and returns [B, T] (advantages + values, the value head's target), 0 outside the mask.
    """
    rewards, values = at_least_float32(rewards), at_least_float32(values)
    next_value = values.new_zeros(len(values)) if bootstrap is None else at_least_float32(bootstrap)
    running = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        trained, value = mask[:, t], values[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        running = torch.where(trained, delta + gamma * lam * running, running)
        next_value = torch.where(trained, value, next_value)
        advantages[:, t] = running.masked_fill(~trained, 0.0)
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


def _centre(rewards: Tensor, group_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards minus their group's mean [n], each sample's group 0 … groups-1 [n], and the groups' sizes
    [groups]."""
    flat = at_least_float32(rewards).flatten()
    if group_ids is not None:
        if group_ids.shape != rewards.shape:
            raise ValueError(
                f"group_ids has shape {list(group_ids.shape)}, rewards {list(rewards.shape)}: one id per reward"
            )
        _, ids = group_ids.flatten().unique(return_inverse=True)
    elif rewards.dim() == 2:
        ids = torch.arange(len(rewards), device=flat.device).repeat_interleave(rewards.shape[1])
    else:
        raise ValueError(f"rewards of shape {list(rewards.shape)} need group_ids; without them pass [groups, samples]")
    counts = torch.bincount(ids)
    # Subtract the group's smallest reward first: equal rewards become exact zeros before any rounding.
    smallest = flat.new_zeros(len(counts)).scatter_reduce(0, ids, flat, "amin", include_self=False)
    flat = flat - smallest[ids]
    return flat - (_group_sum(flat, ids, counts) / counts)[ids], ids, counts


def _group_sum(flat: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return flat.new_zeros(len(counts)).index_add_(0, ids, flat)


def _centre_all(flat: Tensor) -> Tensor:
    # As in `_centre`: equal values become exact zeros.
    flat = flat - flat.min()
    return flat - flat.mean()


def _deviation(centred: Tensor) -> Tensor:
    return (centred.square().sum() / max(len(centred) - 1, 1)).sqrt()


ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""Estimators that need only rewards, by their names in the catalogue: f(rewards, group_ids)."""
