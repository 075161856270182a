"""The section `algorithm` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.algorithms.catalogue import algorithm
from april.config.ranges import Discount, NotNegative, NotNegativeUnbounded, Positive, PositiveUnbounded


@dataclass(kw_only=True)
class AlgorithmSettings:
    """The training objective.

    Args:
        algorithm: Published algorithm whose defaults apply; `april algorithms` lists them.
        correction: Off-policy correction; `april algorithms` lists the choices. Unset: geometric for gspo and
            gspo_token, whose clip range is made for ratios within a step; rollout_logprobs for all others.
        correction_cap: Upper bound at which importance weights are truncated; unset: as published. Only for corrections
            with weights.
        correction_low: Mask tokens (or sequences) with a smaller importance weight; unset: as published.
        correction_high: Mask tokens (or sequences) with a larger importance weight; unset: as published.
        correction_delta: dppo: maximum change of a token's probability; opsm: maximum decrease of a response's mean
            log-probability; unset: as published.
        correction_max_age: Mask tokens that were sampled more weight updates ago; unset: no limit.
        eps_low: Lower clip range; unset: as published.
        eps_high: Upper clip range; unset: as published.
        dual_clip: Bound of the loss for negative advantages, larger than 1 (usually 3); unset: as published.
        loss_aggregation: Aggregation of token losses; unset: as published. An episode of several sequences weighs as
            one with sequence-mean and constant, and by its tokens with token-mean.
        kl_coef: Weight of the KL penalty to the initial policy; unset: as published.
        entropy_coef: Weight of the entropy bonus.
        gamma: ppo: discount; unset: as published.
        gae_lambda: ppo: λ of generalised advantage estimation; unset: as published.
        turn_discount: With an environment: train on each turn separately, with the later turns' rewards discounted by
            this factor per turn (for ppo: by turn, too); unset: train on the reward of the whole episode.
        value_clip: ppo: maximum change of a value estimate in an update; inf: no bound.
    """

    algorithm: str = "grpo"
    correction: str | None = None
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
    def correction_in_use(self) -> str:
        """Return the correction, which is the algorithm's if none is set.

        Raises:
            ValueError: none is set, and there is no such algorithm.
        """
        return self.correction or algorithm(self.algorithm).correction

    @property
    def correction_bounds(self) -> dict[str, float]:
        """Return the bounds that are set, by their parameter names in `corrections.correct`."""
        names = ("cap", "low", "high", "delta", "max_age")
        bounds = {name: getattr(self, f"correction_{name}") for name in names}
        return {name: value for name, value in bounds.items() if value is not None}
