"""Off-policy correction of tokens that older policies sampled, as one step that any policy loss takes.

Three policies meet at each token: π_θ, being trained; π_prox, as training of this batch began; and μ, the one that
sampled the token, whose log-probability was recorded then. w = π_prox/μ. A correction says which of them is the
denominator of the loss's ratio, what each token's loss is multiplied by, and which tokens still count:

    c = correct(kind, logp, prox, behaviour, mask, ages, advantages)
    token_loss = ppo_clip(logp, c.old_logprobs, advantages, c.mask).loss * c.weights
    loss = aggregate(token_loss, mask, mode, denominator)

`aggregate` takes the whole `mask`, not `c.mask`: a token a correction removes adds nothing, and still counts in the
denominator, as in the published objectives.

Invariants:
- on-policy (π_θ = π_prox = μ) every correction is the identity: weights 1, nothing masked or capped;
- where π_prox = μ, all kinds agree (of DPPO and OPSM as long as π_θ is inside their trust regions);
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
"""A sequence's ratio counts no more than this in the effective sample size: VCPO's cap."""

CorrectionKind = Literal[
    "none",
    "behaviour",
    "decoupled",
    "tis",
    "icepop",
    "sequence",
    "geometric",
    "dppo",
    "opsm",
]


class Correction(NamedTuple):
    old_logprobs: Tensor
    """Denominator of the policy loss's ratio, [B, T], without gradient."""
    weights: Tensor
    """What each token's loss is multiplied by, [B, T]; 0 where `mask` is False."""
    mask: Tensor
    """Tokens that still carry gradient, [B, T]; a subset of the loss mask."""
    capped: Tensor
    """Tokens whose weight was cut down to the cap, [B, T]."""


@torch.no_grad()
def correct(
    kind: CorrectionKind,
    logp: Tensor,
    prox: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    ages: Tensor | None = None,
    advantages: Tensor | None = None,
    *,
    cap: float | None = None,
    low: float | None = None,
    high: float | None = None,
    delta: float | None = None,
    max_age: int | None = None,
) -> Correction:
    """The correction named `kind`, with the bounds that the catalogue publishes for it. `max_age` goes with each.

    - "none": stale tokens are taken for on-policy; the ratio is π_θ/π_prox.
    - "behaviour": PPO on the recorded probabilities; the ratio is π_θ/μ.
    - "decoupled": ratio π_θ/π_prox, weight w. AReaL, arXiv 2505.24298, equation 5 (decoupled PPO: arXiv 2110.00641).
      AReaL's code drops tokens with w > 5: `high=5`.
    - "tis": decoupled with weight min(w, cap), cap 2. Truncated importance sampling (Yao et al., "Your efficient RL
      framework secretly brings you off-policy RL training", 2025).
    - "icepop": decoupled with tokens dropped unless low ≤ w ≤ high, 0.5 and 5. IcePop: Ring-1T, arXiv 2510.18855.
    - "sequence": weight min(W, cap), cap 2, with W the product of w over the sequence. The unbiased one, and the one
      whose variance grows with length.
    - "geometric": W^(1/length), sequences dropped unless 0.99 ≤ W^(1/length) ≤ 1.01.
    - "dppo": ratio π_θ/μ; a token is dropped if A > 0 and π_θ - μ > delta, or A < 0 and π_θ - μ < -delta, delta 0.2.
      DPPO-Binary-TV, arXiv 2602.04879: it takes the place of the clip. Its loss also has `CorrectionRule.pull`.
    - "opsm": ratio π_θ/μ; a sequence is dropped if A < 0 and its mean of log μ/π_θ is above delta, 1e-4. Off-policy
      sequence masking, DeepSeek-V3.2.

    Args:
        logp: log π_θ of each token, [B, T]; "dppo" and "opsm" look at it. At the start of a step it is `prox`.
        prox: log π_prox of each token, [B, T].
        behaviour: log μ of each token, [B, T].
        mask: True for trained policy tokens, [B, T].
        ages: policy versions between the one that sampled a token and the one training starts from, [B, T].
        advantages: one per sequence, [B], or one per token, [B, T]; "dppo" and "opsm" look at them.
        cap: weights above are cut down to it; None is the kind's own, inf is none.
        low: tokens (or sequences) with a smaller weight are dropped; None is the kind's own, 0 is none.
        high: tokens (or sequences) with a larger weight are dropped; None is the kind's own, inf is none.
        delta: how far π_θ may have moved from μ; None is the kind's own.
        max_age: tokens older than this carry no gradient; None is no limit. Their samples' rewards still count in
            the advantages of the others.

    Raises:
        ValueError: an unknown kind; a bound that the kind does not have; `max_age` without `ages`; "dppo" or
            "opsm" without `advantages`.
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"correction = {kind!r}: must be one of {', '.join(get_args(CorrectionKind))}")
    rule = CORRECTIONS[kind]
    given = {"cap": cap, "low": low, "high": high, "delta": delta}
    for name, value in given.items():
        if value is not None and name not in rule.bounds:
            raise ValueError(f'correction "{kind}" has no {name}: {", ".join(rule.bounds) or "no bound"} applies to it')
    bounds = rule.bounds | {name: value for name, value in given.items() if value is not None}
    kept = recent(mask, ages, max_age)
    if rule.trust is not None:
        kept = kept & ~_moved_too_far(rule.trust, logp, behaviour, mask, advantages, bounds["delta"])
    weights = _weights(rule.level, log_ratio(prox, behaviour, mask), mask)
    old = prox if rule.denominator == "prox" else behaviour
    capped = torch.zeros_like(mask)
    if rule.level is not None:
        kept = kept & (weights >= bounds["low"]) & (weights <= bounds["high"])
        capped = kept & (weights > bounds["cap"])
        weights = weights.clamp(max=bounds["cap"])
    return Correction(old.detach(), weights.masked_fill(~kept, 0.0), kept, capped)


def recent(mask: Tensor, ages: Tensor | None, max_age: int | None) -> Tensor:
    """The tokens of `mask` that are not older than `max_age`, [B, T]; all of them if it is None.

    Raises:
        ValueError: there is a `max_age` and no `ages`.
    """
    if max_age is None:
        return mask
    if ages is None:
        raise ValueError("max_age needs the tokens' ages")
    return mask & (ages <= max_age)


def _moved_too_far(
    what: str, logp: Tensor, behaviour: Tensor, mask: Tensor, advantages: Tensor | None, delta: float
) -> Tensor:
    """Tokens that have moved, or whose sequence has, by more than `delta` the way their advantage pushes, [B, T]."""
    if advantages is None:
        raise ValueError("this correction needs the advantages")
    a = advantages if advantages.dim() == 2 else advantages[:, None]
    if what == "sequence":
        return (a < 0) & (-sequence_mean(log_ratio(logp, behaviour, mask), mask)[:, None] > delta)
    change = at_least_float32(logp).exp() - at_least_float32(behaviour).exp()
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
    """How far from on-policy the tokens were and what was done about it, by token age.

    Sums, so that micro-batches add up exactly: `a + b` are the diagnostics of both together. Age k is in column k, all
    ages from the last column's on are in the last.
    """

    sums: Tensor
    """[6, ages]: numbers of tokens, of clipped, masked and capped ones; sums of w and of log μ/π_prox."""
    k3: Tensor
    """Sums of the k3 estimate of KL(μ ‖ π_prox), [ages]."""
    largest: Tensor
    """Largest w, [ages]; 0 where there is no token."""
    sequences: Tensor
    """Number of trained sequences, sums of their ratios W = π_θ/μ and of W², [3]; W is cut down to `LARGEST_RATIO`."""

    @classmethod
    def none(cls, oldest: int = 8) -> Diagnostics:
        """Those of no token at all: what sums begin with."""
        return cls(torch.zeros(6, oldest + 1), torch.zeros(oldest + 1), torch.zeros(oldest + 1), torch.zeros(3))

    def __add__(self, other: Diagnostics) -> Diagnostics:
        largest = torch.maximum(self.largest, other.largest)
        return Diagnostics(self.sums + other.sums, self.k3 + other.k3, largest, self.sequences + other.sequences)

    def to(self, device: torch.device | str) -> Diagnostics:
        return Diagnostics(*(value.to(device) for value in (self.sums, self.k3, self.largest, self.sequences)))

    @property
    def effective_sample_size(self) -> float:
        """(ΣW)² / (B ΣW²) of the B trained sequences, in (0, 1]: the share of a fresh batch that this one is worth.

        VCPO, arXiv 2602.17616. 1 where there is no sequence.
        """
        count, total, squares = self.sequences.double().tolist()
        return total**2 / (count * squares) if squares else 1.0

    def metrics(self) -> dict[str, float]:
        """Plain numbers for a log, overall and under `age_<k>/` for each age that has tokens.

        `tokens` (a count), `clipped`, `masked`, `capped` (fractions of trained tokens), `w_mean`, `w_max` (of
        w = π_prox/μ, before cap and mask), `kl` and `kl_k3` (KL(μ ‖ π_prox) in nats, by its two estimates);
        overall only `ess`, the effective sample size.
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
    prox: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    ages: Tensor | None = None,
    clipped: Tensor | None = None,
    oldest: int = 8,
    logp: Tensor | None = None,
) -> Diagnostics:
    """What `correction` met and did.

    Args:
        correction: what `correct` returned for these tokens.
        prox: log π_prox of each token, [B, T].
        behaviour: log μ of each token, [B, T].
        mask: True for trained policy tokens, [B, T].
        ages: policy versions since each token was sampled, [B, T]; all 0 if absent.
        clipped: `PolicyLoss.clipped`, [B, T]; none if absent.
        oldest: ages from this one on are reported together.
        logp: log π_θ of each token, [B, T], for the effective sample size; `prox` if absent.
    """
    log_w = log_ratio(prox, behaviour, mask)[mask]
    w = bounded_exp(log_w)
    age = torch.zeros_like(log_w, dtype=torch.long) if ages is None else ages[mask].long().clamp(0, oldest)
    hit = torch.zeros_like(mask) if clipped is None else clipped
    rows = [torch.ones_like(w), hit[mask], ~correction.mask[mask], correction.capped[mask], w, -log_w, w - 1 - log_w]
    stacked = torch.stack([at_least_float32(row) for row in rows])
    sums = stacked.new_zeros(len(rows), oldest + 1).index_add_(1, age, stacked)
    largest = w.new_zeros(oldest + 1).scatter_reduce_(0, age, w, "amax")
    return Diagnostics(sums[:-1], sums[-1], largest, _sequences(prox if logp is None else logp, behaviour, mask))


def _sequences(logp: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    ratios = bounded_exp(log_ratio(logp, behaviour, mask).sum(-1)).clamp(max=LARGEST_RATIO)
    trained = mask.any(-1).to(ratios.dtype)
    return torch.stack([trained.sum(), (trained * ratios).sum(), (trained * ratios.square()).sum()])


def _named(column: list[float], prefix: str) -> dict[str, float]:
    tokens, *totals, largest = column
    names = ("clipped", "masked", "capped", "w_mean", "kl", "kl_k3")
    means = {prefix + name: total / max(tokens, 1.0) for name, total in zip(names, totals, strict=True)}
    return {prefix + "tokens": tokens, **means, prefix + "w_max": largest}
