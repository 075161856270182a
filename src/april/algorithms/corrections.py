"""Off-policy correction of tokens that older policies sampled, applicable to any policy loss.

Each token has three policies: π_θ, the policy being trained; π_prox, the policy when training on this batch began; and
μ, the policy that sampled the token and whose log-probability the engine recorded. w = π_prox/μ. A correction chooses
the denominator of the loss's ratio, a weight for each token's loss, and the tokens that keep their gradient:

    c = correct(kind, logp, proximal_logprobs, rollout_logprobs, mask, token_staleness, advantages)
    token_loss = ppo_clip(logp, c.old_logprobs, advantages, c.mask).loss * c.weights
    loss = aggregate(token_loss, mask, mode, denominator)

Pass the whole `mask` to `aggregate`, not `c.mask`: a token that the correction drops adds nothing to the sum but still
counts in the denominator, as in the published objectives.

Invariants:
- on-policy (π_θ = π_prox = μ) every correction is the identity: weights 1, nothing masked or capped;
- where π_prox = μ, all kinds agree (DPPO and OPSM as long as π_θ is inside their trust regions);
- weights carry no gradient, are finite, and are 0 wherever `Correction.mask` is False.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from april.algorithms.catalogue import CORRECTIONS
from april.algorithms.ratios import at_least_float32, bounded_exp, log_ratio, sequence_mean

LARGEST_RATIO = 8.0
"""Cap of a sequence's ratio in the effective sample size, as in VCPO."""

CorrectionKind = Literal[
    "none",
    "rollout_logprobs",
    "decoupled",
    "tis",
    "icepop",
    "sequence",
    "geometric",
    "dppo",
    "opsm",
]


class Correction(NamedTuple):
    """Result of `correct` for a batch of tokens."""

    old_logprobs: Tensor
    """Denominator of the policy loss's ratio, [B, T], without gradient."""
    weights: Tensor
    """Weight of each token's loss, [B, T]; 0 where `mask` is False."""
    mask: Tensor
    """Tokens that keep their gradient, [B, T]; a subset of the loss mask."""
    capped: Tensor
    """Tokens whose weight was capped, [B, T]."""


@torch.no_grad()
def correct(
    kind: CorrectionKind,
    logp: Tensor,
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    token_staleness: Tensor | None = None,
    advantages: Tensor | None = None,
    *,
    cap: float | None = None,
    low: float | None = None,
    high: float | None = None,
    delta: float | None = None,
    max_age: int | None = None,
) -> Correction:
    """Compute the correction named `kind` with its published bounds. `max_age` combines with every kind.

    - "none": treat stale tokens as on-policy; the ratio is π_θ/π_prox.
    - "rollout_logprobs": PPO on the log-probabilities recorded during the rollout; the ratio is π_θ/μ.
    - "decoupled": ratio π_θ/π_prox, weight w. AReaL, arXiv 2505.24298, equation 5 (decoupled PPO: arXiv 2110.00641).
      AReaL's code drops tokens with w > 5: `high=5`.
    - "tis": decoupled with weight min(w, cap), cap 2. Truncated importance sampling (Yao et al., "Your efficient RL
      framework secretly brings you off-policy RL training", 2025).
    - "icepop": decoupled with tokens dropped unless low ≤ w ≤ high, 0.5 and 5. IcePop: Ring-1T, arXiv 2510.18855.
    - "sequence": weight min(W, cap), cap 2, with W the product of w over the sequence. Without the cap it is unbiased,
      and its variance grows with length.
    - "geometric": W^(1/length), sequences dropped unless 0.99 ≤ W^(1/length) ≤ 1.01.
    - "dppo": ratio π_θ/μ; a token is dropped if A > 0 and π_θ - μ > delta, or A < 0 and π_θ - μ < -delta, delta 0.2.
      DPPO-Binary-TV, arXiv 2602.04879: it replaces the clip. Its loss also has `CorrectionRule.log_ratio_penalty`.
    - "opsm": ratio π_θ/μ; a sequence is dropped if A < 0 and its mean of log μ/π_θ is above delta, 1e-4. Off-policy
      sequence masking, DeepSeek-V3.2.

    Args:
        logp: log π_θ of each token, [B, T]; used by "dppo" and "opsm". At the start of a step it equals
            `proximal_logprobs`.
        proximal_logprobs: log π_prox of each token, [B, T].
        rollout_logprobs: log μ of each token, [B, T].
        mask: True for trained policy tokens, [B, T].
        token_staleness: weight updates between sampling each token and this training step, [B, T].
        advantages: one per sequence, [B], or one per token, [B, T]; used by "dppo" and "opsm".
        cap: upper bound of weights; None for the published value, inf for no bound.
        low: drop tokens (or sequences) with a smaller weight; None for the published value, 0 for no bound.
        high: drop tokens (or sequences) with a larger weight; None for the published value, inf for no bound.
        delta: largest distance of π_θ from μ; None for the published value.
        max_age: largest staleness of a token with gradient; None for no limit. Rewards of samples with older tokens
            still count in group baselines.

    Raises:
        ValueError: `kind` is unknown or does not have a bound that was given; `max_age` without `token_staleness`;
            "dppo" or "opsm" without `advantages`.
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"correction = {kind!r}: must be one of {', '.join(get_args(CorrectionKind))}")
    rule = CORRECTIONS[kind]
    given = {"cap": cap, "low": low, "high": high, "delta": delta}
    for name, value in given.items():
        if value is not None and name not in rule.bounds:
            raise ValueError(f'correction "{kind}" has no {name}: {", ".join(rule.bounds) or "no bound"} applies to it')
    bounds = rule.bounds | {name: value for name, value in given.items() if value is not None}
    kept = recent(mask, token_staleness, max_age)
    if rule.trust is not None:
        kept = kept & ~_moved_too_far(rule.trust, logp, rollout_logprobs, mask, advantages, bounds["delta"])
    weights = _weights(rule.level, log_ratio(proximal_logprobs, rollout_logprobs, mask), mask)
    old_logprobs = proximal_logprobs if rule.denominator == "proximal_logprobs" else rollout_logprobs
    capped = torch.zeros_like(mask)
    if rule.level is not None:
        # The window tests weights before the cap, which would bring large weights inside it.
        kept = kept & (weights >= bounds["low"]) & (weights <= bounds["high"])
        capped = kept & (weights > bounds["cap"])
        weights = weights.clamp(max=bounds["cap"])
    return Correction(old_logprobs.detach(), weights.masked_fill(~kept, 0.0), kept, capped)


def recent(mask: Tensor, token_staleness: Tensor | None, max_age: int | None) -> Tensor:
    """Return the tokens of `mask` whose staleness is at most `max_age`, [B, T]; all of them if `max_age` is None.

    Raises:
        ValueError: `max_age` without `token_staleness`.
    """
    if max_age is None:
        return mask
    if token_staleness is None:
        raise ValueError("max_age needs token_staleness")
    return mask & (token_staleness <= max_age)


def _moved_too_far(
    level: str, logp: Tensor, rollout_logprobs: Tensor, mask: Tensor, advantages: Tensor | None, delta: float
) -> Tensor:
    """Return tokens whose probability has moved by more than `delta` in the direction of their advantage, [B, T].

    With level "sequence": the tokens of sequences with negative advantage whose mean log μ/π_θ is above `delta`.
    """
    if advantages is None:
        raise ValueError("this correction needs the advantages")
    a = advantages if advantages.dim() == 2 else advantages[:, None]
    if level == "sequence":
        return (a < 0) & (-sequence_mean(log_ratio(logp, rollout_logprobs, mask), mask)[:, None] > delta)
    change = at_least_float32(logp).exp() - at_least_float32(rollout_logprobs).exp()
    return (a > 0) & (change > delta) | (a < 0) & (change < -delta)


def _weights(level: str | None, log_w: Tensor, mask: Tensor) -> Tensor:
    if level is None:
        return torch.ones_like(log_w)
    if level == "sequence":
        log_w = log_w.sum(-1, keepdim=True).expand_as(log_w)
    elif level == "geometric":
        log_w = sequence_mean(log_w, mask)[:, None].expand_as(log_w)
    return bounded_exp(log_w)


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Statistics of how off-policy the tokens were and of what the correction did, by token staleness.

    All fields are sums or maxima, so those of micro-batches add up exactly: `a + b` are the diagnostics of both
    together. Column k is for staleness k; the last column is for that staleness and above.
    """

    sums: Tensor
    """[6, columns]: numbers of tokens, of clipped, of masked and of capped tokens; sums of w and of log μ/π_prox."""
    k3: Tensor
    """Sums of the k3 estimate of KL(μ ‖ π_prox), [columns]."""
    largest: Tensor
    """Largest w, [columns]; 0 in a column without tokens."""
    sequences: Tensor
    """Number of trained sequences, sums of their ratios W = π_θ/μ and of W², [3]; W is capped at `LARGEST_RATIO`."""

    @classmethod
    def none(cls, oldest: int = 8) -> Diagnostics:
        """Return the diagnostics of no tokens: the neutral element of `+`."""
        return cls(torch.zeros(6, oldest + 1), torch.zeros(oldest + 1), torch.zeros(oldest + 1), torch.zeros(3))

    def __add__(self, other: Diagnostics) -> Diagnostics:
        largest = torch.maximum(self.largest, other.largest)
        return Diagnostics(self.sums + other.sums, self.k3 + other.k3, largest, self.sequences + other.sequences)

    def to(self, device: torch.device | str) -> Diagnostics:
        return Diagnostics(*(value.to(device) for value in (self.sums, self.k3, self.largest, self.sequences)))

    @property
    def effective_sample_size(self) -> float:
        """(ΣW)² / (B ΣW²) of the B trained sequences, in (0, 1]: the batch's worth relative to an on-policy batch.

        VCPO, arXiv 2602.17616. 1 for no sequences.
        """
        count, total, squares = self.sequences.double().tolist()
        return total**2 / (count * squares) if squares else 1.0

    def metrics(self) -> dict[str, float]:
        """Return plain numbers for logging, overall and under `age_<k>/` for each staleness k that has tokens.

        `tokens` (a count), `clipped`, `masked`, `capped` (fractions of trained tokens), `w_mean`, `w_max` (of
        w = π_prox/μ, before cap and mask), `kl` and `kl_k3` (two estimates of KL(μ ‖ π_prox) in nats); overall also
        `ess`, the effective sample size.
        """
        columns = torch.cat([self.sums, self.k3[None], self.largest[None]]).double().cpu()
        overall = torch.cat([columns[:-1].sum(-1), columns[-1:].max(-1).values])
        result = _named(overall.tolist(), "") | {"ess": self.effective_sample_size}
        last = columns.shape[1] - 1
        for age, column in enumerate(columns.T.tolist()):
            if column[0]:
                result |= _named(column, f"age_{age}{'+' if age == last else ''}/")
        return result


@torch.no_grad()
def diagnostics(
    correction: Correction,
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    token_staleness: Tensor | None = None,
    clipped: Tensor | None = None,
    oldest: int = 8,
    logp: Tensor | None = None,
) -> Diagnostics:
    """Measure how off-policy the tokens are and what `correction` did.

    Args:
        correction: result of `correct` for these tokens.
        proximal_logprobs: log π_prox of each token, [B, T].
        rollout_logprobs: log μ of each token, [B, T].
        mask: True for trained policy tokens, [B, T].
        token_staleness: weight updates since each token was sampled, [B, T]; all 0 if None.
        clipped: `PolicyLoss.clipped`, [B, T]; no token if None.
        oldest: staleness from which on tokens are counted together.
        logp: log π_θ of each token, [B, T], for the effective sample size; `proximal_logprobs` if None.
    """
    log_w = log_ratio(proximal_logprobs, rollout_logprobs, mask)[mask]
    w = bounded_exp(log_w)
    column = torch.zeros_like(log_w, dtype=torch.long)
    if token_staleness is not None:
        column = token_staleness[mask].long().clamp(0, oldest)
    hit = torch.zeros_like(mask) if clipped is None else clipped
    rows = [torch.ones_like(w), hit[mask], ~correction.mask[mask], correction.capped[mask], w, -log_w, w - 1 - log_w]
    stacked = torch.stack([at_least_float32(row) for row in rows])
    sums = stacked.new_zeros(len(rows), oldest + 1).index_add_(1, column, stacked)
    largest = w.new_zeros(oldest + 1).scatter_reduce_(0, column, w, "amax")
    sequences = _sequences(proximal_logprobs if logp is None else logp, rollout_logprobs, mask)
    return Diagnostics(sums[:-1], sums[-1], largest, sequences)


def _sequences(logp: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    # Long sequences have products far from 1; without the cap one of them would determine the sample size.
    ratios = bounded_exp(log_ratio(logp, rollout_logprobs, mask).sum(-1)).clamp(max=LARGEST_RATIO)
    trained = mask.any(-1).to(ratios.dtype)
    return torch.stack([trained.sum(), (trained * ratios).sum(), (trained * ratios.square()).sum()])


def _named(column: list[float], prefix: str) -> dict[str, float]:
    tokens, *totals, largest = column
    names = ("clipped", "masked", "capped", "w_mean", "kl", "kl_k3")
    means = {prefix + name: total / max(tokens, 1.0) for name, total in zip(names, totals, strict=True)}
    return {prefix + "tokens": tokens, **means, prefix + "w_max": largest}
