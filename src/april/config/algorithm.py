"""The section `algorithm` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.config.ranges import Discount, NotNegative, NotNegativeUnbounded, Positive, PositiveUnbounded


@dataclass(kw_only=True)
class AlgorithmSettings:
    """What is optimised.

    Args:
        algorithm: Published defaults to start from; `april algorithms` lists them.
        correction: How tokens of older policies are corrected for; `april algorithms` lists the choices.
        correction_cap: Weights above are cut down to it; unset: as published. Kinds with a weight only.
        correction_low: Tokens (or sequences) of a smaller weight are dropped; unset: as published.
        correction_high: Tokens (or sequences) of a larger weight are dropped; unset: as published.
        correction_delta: dppo: how far a token's probability may move; opsm: how far a response's mean log-probability
            may fall; unset: as published.
        correction_max_age: Tokens sampled more weight updates ago carry no gradient; unset: no limit.
        eps_low: Lower clip range; unset: as published.
        eps_high: Upper clip range; unset: as published.
        dual_clip: Bound of the loss for negative advantages, above 1 (3 is usual); unset: as published.
        loss_aggregation: How token losses become one number; unset: as published.
        kl_coef: Weight of the KL penalty to the initial policy; unset: as published.
        entropy_coef: Weight of an entropy bonus.
        gamma: ppo: discount; unset: as published.
        gae_lambda: ppo: λ of generalised advantage estimation; unset: as published.
        turn_discount: With an environment: each turn's tokens are trained on its own and the later turns' rewards,
            discounted by this a turn (by turn for ppo, too); unset: on the whole episode's reward.
        value_clip: ppo: how far a value may move from its estimate before the update; inf is no bound.
    """

    algorithm: str = "grpo"
    correction: str = "rollout_logprobs"
    correction_cap: PositiveUnbounded[float] | None = None
    correction_low: NotNegative[float] | None = None
    correction_high: PositiveUnbounded[float] | None = None
    correction_delta: NotNegative[float] | None = None
    correction_max_age: NotNegative[int] | None = None
    eps_low: NotNegativeUnbounded[float] | None = None
    eps_high: NotNegativeUnbounded[float] | None = None
    dual_clip: Positive[float] | None = None
    loss_aggregation: Literal["token-mean", "sequence-mean", "constant"] | None = None
    kl_coef: NotNegative[float] | None = None
    entropy_coef: float = 0.0
    gamma: Discount | None = None
    gae_lambda: Discount | None = None
    turn_discount: Discount | None = None
    value_clip: PositiveUnbounded[float] = 0.2

    @property
    def correction_bounds(self) -> dict[str, float]:
        """The bounds that are set, by the names `corrections.correct` gives them."""
        names = ("cap", "low", "high", "delta", "max_age")
        bounds = {name: getattr(self, f"correction_{name}") for name in names}
        return {name: value for name, value in bounds.items() if value is not None}
