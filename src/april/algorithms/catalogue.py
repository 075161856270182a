"""Catalogue of algorithms and off-policy corrections with their published settings, as listed by `april algorithms`.

Invariants:
- an entry has the settings that its sources publish; if they leave a setting open, `note` gives a reason;
- `advantage` and `loss` are keys of `advantages.ADVANTAGES` and `losses.LOSSES` ("gae": `advantages.gae`);
- this module does not import torch, so that listing algorithms is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

UNBOUNDED = float("inf")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Settings of an algorithm.

    Args:
        name: value of a recipe's setting `algorithm`.
        title: name in the literature.
        sources: arXiv numbers, the defining paper first.
        advantage: advantage estimator.
        loss: policy loss per token.
        eps_low: the ratio is clipped below 1 - eps_low; inf for no bound.
        eps_high: the ratio is clipped above 1 + eps_high; inf for no bound.
        aggregation: reduction of token losses to one number.
        dual_clip: bound of the loss for negative advantages; None for no bound.
        kl_estimator: estimator of the KL divergence from the reference policy; None without a KL term.
        kl_coefficient: weight of the KL term; 0 needs no reference policy.
        kl_place: whether the KL term is added to the loss or subtracted from each token's reward.
        gamma: discount of `gae`.
        lam: λ of `gae`.
        dynamic_sampling: replace groups without reward variance.
        overlong_filter: mask truncated samples.
        soft_overlong_penalty: lower rewards linearly over the last part of the response budget.
        correction: the off-policy correction unless a recipe names another, a key of `CORRECTIONS`. The papers sample
            with the policy of the step, so they publish none: it is april's choice by its studies.
        note: choices that the sources leave open.
    """

    name: str
    title: str
    sources: tuple[str, ...]
    advantage: str
    loss: str
    eps_low: float
    eps_high: float
    aggregation: Literal["token-mean", "sequence-mean", "constant"]
    dual_clip: float | None = None
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    kl_coefficient: float = 0.0
    kl_place: Literal["loss", "reward"] = "loss"
    gamma: float = 1.0
    lam: float = 1.0
    dynamic_sampling: bool = False
    overlong_filter: bool = False
    soft_overlong_penalty: bool = False
    correction: str = "rollout_logprobs"
    note: str = ""

    @property
    def group_baseline(self) -> bool:
        """Whether a sample's advantage is relative to the other samples of its prompt."""
        return self.advantage not in ("reinforce_plus_plus", "gae")

    @property
    def value_head(self) -> bool:
        """Whether the algorithm trains a value head."""
        return self.advantage == "gae"


@dataclass(frozen=True, slots=True)
class CorrectionRule:
    """Definition of a kind of off-policy correction, with its published bounds.

    Args:
        name: value of a recipe's setting `correction`.
        summary: one-line description.
        denominator: denominator of the loss's ratio.
        level: whether the weight w = π_prox/μ is per token, the product over the sequence, or the sequence's geometric
            mean; None for no weight.
        cap: upper bound of weights.
        low: tokens (or sequences) with a smaller weight are dropped.
        high: tokens (or sequences) with a larger weight are dropped.
        trust: level of the trust region: drop a "token" whose probability has moved from μ by more than `delta` in the
            direction of its advantage, or a "sequence" with negative advantage whose mean log μ/π_θ exceeds `delta`.
        delta: size of the trust region.
        log_ratio_penalty: weight of (log π_θ/μ)² in each token's loss.
    """

    name: str
    summary: str
    denominator: Literal["proximal_logprobs", "rollout_logprobs"] = "proximal_logprobs"
    level: Literal["token", "sequence", "geometric"] | None = None
    cap: float = UNBOUNDED
    low: float = 0.0
    high: float = UNBOUNDED
    trust: Literal["token", "sequence"] | None = None
    delta: float = UNBOUNDED
    log_ratio_penalty: float = 0.0

    @property
    def bounds(self) -> dict[str, float]:
        """Bounds that apply to this kind, by name."""
        if self.trust is not None:
            return {"delta": self.delta}
        return {} if self.level is None else {"cap": self.cap, "low": self.low, "high": self.high}

    @property
    def replaces_clip(self) -> bool:
        """Whether the correction replaces PPO's clip."""
        return self.trust == "token"


_ENTRIES = (
    Algorithm(
        name="grpo",
        title="GRPO",
        sources=("2402.03300",),
        advantage="grpo",
        loss="ppo_clip",
        eps_low=0.2,
        eps_high=0.2,
        aggregation="sequence-mean",
        kl_estimator="k3",
        kl_coefficient=0.04,
        note="The paper leaves ε open: 0.2 is PPO's. Later work mostly sets the KL coefficient to 0.",
    ),
    Algorithm(
        name="dr_grpo",
        title="Dr. GRPO",
        sources=("2503.20783",),
        advantage="dr_grpo",
        loss="ppo_clip",
        eps_low=0.2,
        eps_high=0.2,
        aggregation="constant",
        note="The constant divisor is the response budget times the number of samples.",
    ),
    Algorithm(
        name="dapo",
        title="DAPO",
        sources=("2503.14476",),
        advantage="grpo",
        loss="ppo_clip",
        eps_low=0.2,
        eps_high=0.28,
        aggregation="token-mean",
        dynamic_sampling=True,
        overlong_filter=True,
        soft_overlong_penalty=True,
        note="The penalty's ramp is the last fifth of the response budget (4,096 of 20,480 tokens in the paper).",
    ),
    Algorithm(
        name="gspo",
        title="GSPO",
        sources=("2507.18071",),
        advantage="grpo",
        loss="gspo",
        eps_low=3e-4,
        eps_high=4e-4,
        aggregation="sequence-mean",
        correction="geometric",
    ),
    Algorithm(
        name="gspo_token",
        title="GSPO-token",
        sources=("2507.18071",),
        advantage="grpo",
        loss="gspo_token",
        eps_low=3e-4,
        eps_high=4e-4,
        aggregation="sequence-mean",
        correction="geometric",
    ),
    Algorithm(
        name="cispo",
        title="CISPO",
        sources=("2506.13585", "2510.13786"),
        advantage="grpo",
        loss="cispo",
        eps_low=UNBOUNDED,
        eps_high=4.0,
        aggregation="token-mean",
        dynamic_sampling=True,
        soft_overlong_penalty=True,
        note="MiniMax-M1 publishes no ε_high: ratios up to 5 are the recommendation for ScaleRL.",
    ),
    Algorithm(
        name="rloo",
        title="RLOO",
        sources=("2402.14740",),
        advantage="rloo",
        loss="ppo_clip",
        eps_low=UNBOUNDED,
        eps_high=UNBOUNDED,
        aggregation="constant",
        kl_estimator="k1",
        kl_coefficient=0.03,
        kl_place="reward",
        note="REINFORCE: without a clip the loss has its gradient on-policy. A response is one action, hence the sum "
        "over its tokens. The KL coefficient is that of the paper's summarisation task (0.1 in its dialogue task).",
    ),
    Algorithm(
        name="reinforce_plus_plus",
        title="REINFORCE++",
        sources=("2501.03262",),
        advantage="reinforce_plus_plus",
        loss="ppo_clip",
        eps_low=0.2,
        eps_high=0.2,
        aggregation="token-mean",
        kl_estimator="k1",
        kl_coefficient=0.001,
        kl_place="reward",
        note="The KL coefficient is what implementations use.",
    ),
    Algorithm(
        name="reinforce_plus_plus_baseline",
        title="REINFORCE++ with baseline",
        sources=("2501.03262",),
        advantage="reinforce_plus_plus_baseline",
        loss="ppo_clip",
        eps_low=0.2,
        eps_high=0.2,
        aggregation="token-mean",
        kl_estimator="k2",
        kl_coefficient=0.001,
        note="The KL coefficient is what implementations use.",
    ),
    Algorithm(
        name="ppo",
        title="PPO",
        sources=("1707.06347", "1506.02438", "2203.02155"),
        advantage="gae",
        loss="ppo_clip",
        eps_low=0.2,
        eps_high=0.2,
        aggregation="token-mean",
        kl_estimator="k1",
        kl_coefficient=0.02,
        kl_place="reward",
        lam=0.95,
        note="KL coefficient and discount are InstructGPT's. A dual clip at 3 (1912.09729) is an option.",
    ),
)

ALGORITHMS: dict[str, Algorithm] = {entry.name: entry for entry in _ENTRIES}
"""All algorithms by name, in listing order."""

_RULES = (
    CorrectionRule("none", "treats stale tokens as on-policy; the ratio is π_θ/π_prox"),
    CorrectionRule(
        "rollout_logprobs",
        "PPO on the log-probabilities of the rollout; the ratio is π_θ/μ (1707.06347)",
        "rollout_logprobs",
    ),
    CorrectionRule(
        "decoupled", "ratio π_θ/π_prox, each token weighted by w = π_prox/μ (AReaL, 2505.24298)", level="token"
    ),
    CorrectionRule(
        "tis",
        "decoupled with w capped (truncated importance sampling, Yao et al. 2025)",
        level="token",
        cap=2.0,
    ),
    CorrectionRule(
        "icepop",
        "decoupled, tokens dropped unless low ≤ w ≤ high (IcePop, 2510.18855)",
        level="token",
        low=0.5,
        high=5.0,
    ),
    CorrectionRule("sequence", "decoupled with the product of w over the sequence, capped", level="sequence", cap=2.0),
    CorrectionRule(
        "geometric",
        "sequences dropped unless the geometric mean of w lies between low and high",
        level="geometric",
        low=0.99,
        high=1.01,
    ),
    CorrectionRule(
        "dppo",
        "ratio π_θ/μ; tokens dropped once their probability has moved by more than delta in the direction of their "
        "advantage, instead of the clip, and a penalty 0.001 (log π_θ/μ)² on all (DPPO-Binary-TV, 2602.04879)",
        "rollout_logprobs",
        trust="token",
        delta=0.2,
        log_ratio_penalty=1e-3,
    ),
    CorrectionRule(
        "opsm",
        "ratio π_θ/μ; responses of negative advantage dropped once the mean of log μ/π_θ is above delta, in addition "
        "to the clip (off-policy sequence masking, DeepSeek-V3.2, which leaves delta open: 1e-4 is slime's)",
        "rollout_logprobs",
        trust="sequence",
        delta=1e-4,
    ),
)

CORRECTIONS: dict[str, CorrectionRule] = {rule.name: rule for rule in _RULES}
"""The kinds of `corrections.correct`. μ is the policy that sampled a token, π_prox the policy at the start of the
training step, π_θ the policy being trained."""


def algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`.

    Raises:
        ValueError: there is no such algorithm; the message names the nearest one.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    near = get_close_matches(name, ALGORITHMS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(ALGORITHMS)}"
    raise ValueError(f"algorithm = {name!r}: {hint}")
