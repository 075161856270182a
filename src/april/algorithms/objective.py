"""The objective of an update: an algorithm, a correction and their coefficients, as functions of a batch's tensors.

This module computes no model outputs: callers pass log-probabilities, entropies and values.

Invariants:
- advantages and whitening are computed over the whole batch;
- means and deviations of rewards count episodes, whatever their numbers of sequences;
- with the update's denominator, the losses of its micro-batches add up to the loss of the update;
- a sample with zero advantage still counts in every denominator, even when its loss is not computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from april.algorithms import advantages as estimators
from april.algorithms.batch import Batch
from april.algorithms.catalogue import CORRECTIONS, UNBOUNDED, Algorithm, algorithm
from april.algorithms.corrections import CorrectionKind, Diagnostics, correct, diagnostics, recent
from april.algorithms.dapo import overlong_filter, soft_overlong_penalty
from april.algorithms.losses import LOSSES, aggregate, entropy_bonus, kl, value_clip
from april.algorithms.ratios import log_ratio
from april.algorithms.turn_rewards import TurnRewards, gae_over_turns, rewards_to_go, turn_advantages
from april.rollout.trajectory.sample import Sample


class PolicyTerms(NamedTuple):
    """Contribution of a micro-batch to an update."""

    loss: Tensor
    entropy: Tensor
    """Sum over the tokens, in nats."""
    kl: Tensor
    """Sum of the tokens' estimates of KL(π_θ ‖ π_ref); 0 without a reference policy."""
    diagnostics: Diagnostics


@dataclass(frozen=True, slots=True)
class UpdateSums:
    """Loss and metric sums of an update, additive over micro-batches and ranks."""

    loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    tokens: int = 0
    diagnostics: Diagnostics = field(default_factory=Diagnostics.none)

    def __add__(self, other: UpdateSums) -> UpdateSums:
        return UpdateSums(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective of training: advantages, policy loss, regularisers and value loss.

    Args:
        algorithm: algorithm with the settings in use.
        budget: response budget in tokens.
        correction: kind of off-policy correction.
        bounds: bounds of the correction, by the parameter names of `correct`, that replace the published ones.
        entropy_coef: weight of the entropy bonus.
        value_clip: largest change of a value from its estimate before the update.
        turn_discount: discount per turn of the rewards to go that each turn of an episode is trained on; None trains
            every turn on the reward of the whole episode.
    """

    algorithm: Algorithm
    budget: int
    correction: CorrectionKind = "rollout_logprobs"
    bounds: Mapping[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0
    value_clip: float = 0.2
    turn_discount: float | None = None

    @property
    def regularised(self) -> bool:
        """Whether the objective has a KL penalty, which needs a reference policy."""
        return self.algorithm.kl_coefficient > 0

    @property
    def penalised(self) -> bool:
        """Whether the KL penalty is subtracted from the reward."""
        return self.regularised and self.algorithm.kl_place == "reward"

    def mask(self, mask: Tensor, truncated: Tensor) -> Tensor:
        """Return the mask of tokens to train on.

        Args:
            mask: True where a policy sampled the token, [B, T].
            truncated: True for samples truncated by the response budget, [B].
        """
        return overlong_filter(mask, truncated) if self.algorithm.overlong_filter else mask

    def rewards(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Return the rewards to train on, given rewards and response lengths in tokens, [groups, episodes] each."""
        if not self.algorithm.soft_overlong_penalty:
            return rewards
        # The paper's share of the budget: 4,096 of 20,480 tokens.
        return rewards + soft_overlong_penalty(lengths, self.budget, max(self.budget // 5, 1))

    def with_advantages(self, batch: Batch, rewards: Tensor, samples: Sequence[Sample] = ()) -> Batch:
        """Return `batch` with an advantage per sample or per token, and with returns if there is a critic.

        Args:
            batch: all samples of the step, with `reference_logprobs`, `proximal_logprobs` and `values` as far as the
                objective uses them.
            rewards: rewards to train on, [groups, episodes].
            samples: samples of the batch; needed with `turn_discount`.
        """
        batch = batch.with_shares()
        chosen, mask = self.algorithm, batch.mask
        penalty = self._penalty(batch)
        if self.turn_discount is not None:
            turns = TurnRewards.of(samples, rewards.flatten(), mask.shape[1], batch.episodes).penalised(penalty)
            return self._by_turn(batch, turns, rewards.shape[1], self.turn_discount)
        if chosen.value_head:
            assert batch.values is not None
            token_rewards = estimators.outcome_rewards(batch.per_row(rewards.flatten()), mask) - penalty
            advantages, returns = estimators.gae(token_rewards, batch.values, mask, chosen.gamma, chosen.lam)
            return dataclasses.replace(batch, advantages=estimators.whiten(advantages, mask), returns=returns)
        if chosen.advantage == "reinforce_plus_plus":
            per_row = batch.per_row(rewards.flatten())
            advantages = estimators.reinforce_plus_plus_per_token(per_row, mask, penalty)
        else:
            # An episode is one action: its penalty is the sum over its tokens.
            penalised = rewards - batch.per_episode(penalty.sum(-1)).view_as(rewards)
            advantages = batch.per_row(estimators.ADVANTAGES[chosen.advantage](penalised).flatten())
        return dataclasses.replace(batch, advantages=advantages)

    def _by_turn(self, batch: Batch, turns: TurnRewards, group_size: int, discount: float) -> Batch:
        """Return `batch` with an advantage per turn, at all tokens of the turn."""
        chosen, mask = self.algorithm, batch.mask
        if chosen.value_head:
            assert batch.values is not None
            advantages, returns = gae_over_turns(turns, batch.values, discount, chosen.lam)
            return dataclasses.replace(batch, advantages=estimators.whiten(advantages, mask), returns=returns)
        if chosen.advantage == "reinforce_plus_plus":
            advantages = estimators.whiten(turns.spread(rewards_to_go(turns.rewards, discount)), mask)
        else:
            advantages = turn_advantages(turns, group_size, discount, estimators.ADVANTAGES[chosen.advantage])
        return dataclasses.replace(batch, advantages=advantages)

    def _penalty(self, batch: Batch) -> Tensor:
        """Return the KL penalty on each token's reward, [B, T]."""
        if not self.penalised:
            return torch.zeros(batch.mask.shape)
        assert batch.proximal_logprobs is not None
        assert batch.reference_logprobs is not None
        estimate = kl(
            batch.proximal_logprobs, batch.reference_logprobs, batch.mask, self.algorithm.kl_estimator or "k1"
        )
        return self.algorithm.kl_coefficient * estimate

    def rows_with_gradient(self, batch: Batch) -> list[int]:
        """Return the rows whose loss can have a gradient."""
        assert batch.advantages is not None
        trained = batch.mask.any(-1)
        # These terms, and the log-ratio penalty, have a gradient where the advantage is 0.
        everywhere = self.regularised or self.algorithm.value_head or self.entropy_coef
        if not everywhere and not CORRECTIONS[self.correction].log_ratio_penalty:
            advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
            trained &= (advantages != 0).any(-1)
        return trained.nonzero()[:, 0].tolist()

    @property
    def clips_older_policies(self) -> bool:
        """Whether a clip range meant for sequence ratios within one step bounds ratios against older policies."""
        chosen = self.algorithm
        against_older = CORRECTIONS[self.correction].denominator == "rollout_logprobs"
        return against_older and chosen.loss in ("gspo", "gspo_token") and chosen.eps_low < 0.01

    def denominator(self, batch: Batch) -> float:
        """Return the divisor of the update's loss sum. With it, the losses of micro-batches add up to the update's."""
        if self.algorithm.aggregation == "sequence-mean":
            return batch.episode_count
        if self.algorithm.aggregation == "constant":
            return batch.episode_count * self.budget
        return max(int(batch.mask.sum()), 1)

    def loss(self, batch: Batch, logp: Tensor, entropy: Tensor, denominator: float) -> PolicyTerms:
        """Compute a micro-batch's contribution to the policy loss.

        Args:
            logp: log π_θ of each token, [B, T], with gradient.
            entropy: entropy of the distribution each token was drawn from, [B, T], in nats, with gradient.
            denominator: denominator of the whole update.
        """
        chosen, mask, rule = self.algorithm, batch.mask, CORRECTIONS[self.correction]
        assert batch.advantages is not None
        # Regularisers keep tokens that the correction drops, but not tokens beyond the age limit.
        held = recent(mask, batch.token_staleness, self.bounds.get("max_age"))
        proximal = logp.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        known = batch.rollout_logprobs, mask, batch.token_staleness, batch.advantages
        correction = correct(self.correction, logp, proximal, *known, **self.bounds)
        clip = {"eps_low": chosen.eps_low, "eps_high": chosen.eps_high}
        if chosen.dual_clip is not None:
            clip["dual_clip"] = chosen.dual_clip
        policy = LOSSES[chosen.loss](logp, correction.old_logprobs, batch.advantages, correction.mask, **clip)
        tokens = policy.loss * correction.weights
        divergence = torch.zeros(mask.shape, device=mask.device)
        if rule.log_ratio_penalty:
            tokens = tokens + rule.log_ratio_penalty * log_ratio(logp, batch.rollout_logprobs, held).square()
        if batch.reference_logprobs is not None:
            divergence = kl(logp, batch.reference_logprobs, mask, chosen.kl_estimator or "k3")
        if not self.penalised:
            tokens = tokens + chosen.kl_coefficient * divergence.masked_fill(~held, 0.0)
        if self.entropy_coef:
            tokens = tokens + self.entropy_coef * entropy_bonus(entropy, held)
        measured = diagnostics(
            correction, proximal, batch.rollout_logprobs, mask, batch.token_staleness, policy.clipped, logp=logp
        )
        loss = aggregate(tokens, mask, chosen.aggregation, denominator, batch.shares)
        return PolicyTerms(loss, (entropy.detach() * mask).sum(), divergence.detach().sum(), measured)

    def value_loss(self, batch: Batch, values: Tensor, tokens: int) -> Tensor:
        """Compute a micro-batch's contribution to the critic's loss, a mean over the update's trained tokens.

        Args:
            values: critic's value of each token, [B, T], with gradient.
            tokens: number of trained tokens of the whole update.
        """
        assert batch.values is not None
        assert batch.returns is not None
        terms = value_clip(values, batch.values, batch.returns, batch.mask, self.value_clip)
        return aggregate(terms, batch.mask, "token-mean", tokens)


def resolve(name: str, correction: CorrectionKind, own: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm called `name` for use with `correction`, with `own` settings replacing the published ones.

    Args:
        own: settings by their names in `Algorithm`; None keeps the published value.

    Raises:
        ValueError: there is no such algorithm.
    """
    chosen = algorithm(name)
    # DPPO's trust region replaces PPO's clip. The bounds of CISPO and GSPO are part of their definitions.
    if CORRECTIONS[correction].replaces_clip and chosen.loss == "ppo_clip":
        chosen = dataclasses.replace(chosen, eps_low=UNBOUNDED, eps_high=UNBOUNDED)
    return dataclasses.replace(chosen, **{setting: value for setting, value in own.items() if value is not None})
