"""Dynamic sampling, overlong filtering and the soft overlong penalty of DAPO (arXiv 2503.14476).

DAPO's clip-higher and token-level mean are in `losses.ppo_clip` and `losses.aggregate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from april.algorithms.ratios import at_least_float32


def informative_groups(rewards: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Dynamic sampling (section 3.2): True for groups whose rewards differ; a group of equal rewards has no gradient.

    Args:
        rewards: [groups, samples], or flat [n] with `group_ids`.
        group_ids: [n], any integers.

    Returns:
        [groups], in the order of the rows, or of the sorted distinct ids.
    """
    if group_ids is None:
        if rewards.dim() != 2:
            raise ValueError(f"rewards of shape {list(rewards.shape)} need group_ids; or pass [groups, samples]")
        # Compared exactly: the deviation of equal rewards could be a rounding error above 0.
        return (rewards != rewards[:, :1]).any(-1)
    distinct, ids = group_ids.unique(return_inverse=True)
    flat = at_least_float32(rewards)
    smallest = flat.new_zeros(len(distinct)).scatter_reduce(0, ids, flat, "amin", include_self=False)
    largest = flat.new_zeros(len(distinct)).scatter_reduce(0, ids, flat, "amax", include_self=False)
    return largest > smallest


def soft_overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Term added to the reward for length (equation 13): 0 up to `max_length - cache` tokens, then linear to -1 at
    `max_length`, and -1 beyond. The paper uses max_length 20,480 and cache 4,096.

    Args:
        lengths: response tokens of each sample, any shape.
        max_length: L_max, the shortest length with the full penalty.
        cache: L_cache, the length of the ramp; in (0, max_length].
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache = {cache}: must lie in (0, max_length = {max_length}]")
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """Overlong filtering (section 3.4): the loss mask without truncated samples.

    Rewards of truncated samples still count in the baselines of their groups. Denominators computed from the mask
    shrink with it.

    Args:
        mask: True for trained policy tokens, [B, T].
        truncated: True for samples truncated by the response budget, [B].
    """
    return mask & ~truncated.to(torch.bool)[:, None]
