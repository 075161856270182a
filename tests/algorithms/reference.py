"""The formulas once more, in NumPy and float64, written from the papers sample by sample and token by token.

A loss takes `live` and `frozen`, two copies of log π_θ: what a paper puts under a stop-gradient reads `frozen`. The
gradient is then the finite difference in `live` alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

STEADY = settings(deadline=None, derandomize=True, max_examples=50)
"""For property tests: the same examples each time, since finite differences are wrong next to a clip bound."""

Array = NDArray[np.float64]
Loss = Callable[..., Array]


def trained(mask: Array, i: int) -> list[int]:
    return [t for t in range(mask.shape[1]) if mask[i, t]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo_clip(live, frozen, old, advantages, mask, eps_low, eps_high, dual_clip=None) -> Array:
    loss = np.zeros_like(live)
    for i in range(len(live)):
        for t in trained(mask, i):
            a, r = advantages[i, t], np.exp(live[i, t] - old[i, t])
            objective = min(r * a, clip(r, 1 - eps_low, 1 + eps_high) * a)
            if dual_clip is not None and a < 0:
                objective = max(objective, dual_clip * a)
            loss[i, t] = -objective
    return loss


def sequence_ratio(logp, old, mask, i) -> float:
    tokens = trained(mask, i)
    return float(np.exp(sum(logp[i, t] - old[i, t] for t in tokens) / len(tokens)))


def gspo(live, frozen, old, advantages, mask, eps_low, eps_high) -> Array:
    loss = np.zeros_like(live)
    for i in range(len(live)):
        for t in trained(mask, i):
            s, a = sequence_ratio(live, old, mask, i), advantages[i, t]
            loss[i, t] = -min(s * a, clip(s, 1 - eps_low, 1 + eps_high) * a)
    return loss


def gspo_token(live, frozen, old, advantages, mask, eps_low, eps_high) -> Array:
    loss = np.zeros_like(live)
    for i in range(len(live)):
        for t in trained(mask, i):
            s = sequence_ratio(frozen, old, mask, i) * np.exp(live[i, t] - frozen[i, t])
            a = advantages[i, t]
            loss[i, t] = -min(s * a, clip(s, 1 - eps_low, 1 + eps_high) * a)
    return loss


def cispo(live, frozen, old, advantages, mask, eps_low, eps_high) -> Array:
    loss = np.zeros_like(live)
    for i in range(len(live)):
        for t in trained(mask, i):
            weight = clip(np.exp(frozen[i, t] - old[i, t]), 1 - eps_low, 1 + eps_high)
            loss[i, t] = -weight * advantages[i, t] * live[i, t]
    return loss


def kl(live, frozen, ref, advantages, mask, estimator) -> Array:
    loss = np.zeros_like(live)
    for i in range(len(live)):
        for t in trained(mask, i):
            k1 = live[i, t] - ref[i, t]
            loss[i, t] = {"k1": k1, "k2": k1**2 / 2, "k3": np.exp(-k1) - 1 + k1}[estimator]
    return loss


def aggregate(loss, mask, mode, denominator=None) -> float:
    if mode == "sequence-mean":
        means = [sum(loss[i, t] for t in trained(mask, i)) / max(mask[i].sum(), 1) for i in range(len(loss))]
        return sum(means) / (denominator or len(loss))
    total = sum(loss[i, t] for i in range(len(loss)) for t in trained(mask, i))
    return total / (denominator or max(mask.sum(), 1))


def gradient(f: Callable[[Array], float], x: Array, step: float = 1e-6) -> Array:
    """Central differences of a scalar function."""
    result = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        result[index] = (f(up) - f(down)) / (2 * step)
    return result


def gae(rewards, values, mask, gamma, lam, bootstrap) -> tuple[Array, Array]:
    """By the definition: the sum over all later trained tokens of (γλ)^l δ."""
    advantages = np.zeros_like(values)
    for i in range(len(values)):
        tokens = trained(mask, i)
        states = [values[i, t] for t in tokens] + [bootstrap[i]]
        deltas = [rewards[i, t] + gamma * states[k + 1] - states[k] for k, t in enumerate(tokens)]
        for k, t in enumerate(tokens):
            advantages[i, t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(tokens)))
    return advantages, np.where(mask, advantages + values, 0.0)
