"""What an update minimises: an algorithm, a correction and their coefficients, as functions of a batch's tensors.

It knows no model: log-probabilities, entropies and values come from whoever has one.

Invariants:
- advantages and whitening are of the whole batch;
- with the update's denominator, the losses of its micro-batches add up to the loss of the update;
- a sample without advantage still counts in every denominator, also where its loss is not computed.
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
from april.algorithms.turns import Turns, gae_over_turns, rewards_to_go, turn_advantages
from april.rollout.trajectory import Sample


class PolicyTerms(NamedTuple):
    """What a micro-batch adds to an update."""

    loss: Tensor
    entropy: Tensor
    """Sum over the tokens, in nats."""
    kl: Tensor
    """Sum over the tokens of the estimate of KL(π_θ ‖ π_ref); 0 without a reference policy."""
    met: Diagnostics


@dataclass(frozen=True, slots=True)
class Sums:
    """What an update amounts to, as sums: of micro-batches, and of whoever computed some of them."""

    loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    tokens: int = 0
    met: Diagnostics = field(default_factory=Diagnostics.none)

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))


@dataclass(frozen=True, slots=True)
class Objective:
    """What is optimised.

    Args:
        algorithm: with the settings that are used.
        budget: of a response, in tokens.
        correction: of tokens that older policies sampled.
        bounds: of the correction, by the names `correct` gives them, in place of the published ones.
        entropy_coef: weight of the entropy bonus.
        value_clip: how far a value may move from its estimate before the update.
        turn_discount: reward each turn of an episode with what comes from it on, discounted by this a turn; None
            rewards the episode as a whole.
    """

    algorithm: Algorithm
    budget: int
    correction: CorrectionKind = "behaviour"
    bounds: Mapping[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0
    value_clip: float = 0.2
    turn_discount: float | None = None

    @property
    def regularised(self) -> bool:
        """Whether there is a KL penalty, which needs a reference policy."""
        return self.algorithm.kl_coefficient > 0

    @property
    def penalised(self) -> bool:
        """Whether the KL penalty is taken from the reward."""
        return self.regularised and self.algorithm.kl_place == "reward"

    def mask(self, mask: Tensor, truncated: Tensor) -> Tensor:
        """The tokens trained on.

        Args:
            mask: True where a policy sampled the token, [B, T].
            truncated: True for samples cut off by the response budget, [B].
        """
        return overlong_filter(mask, truncated) if self.algorithm.overlong_filter else mask

    def rewards(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """The rewards trained on, from each sample's own and its response's length in tokens, [groups, samples]."""
        if not self.algorithm.soft_overlong_penalty:
            return rewards
        return rewards + soft_overlong_penalty(lengths, self.budget, max(self.budget // 5, 1))

    def with_advantages(self, batch: Batch, rewards: Tensor, samples: Sequence[Sample] = ()) -> Batch:
        """`batch` with an advantage of each sample or of each token, and with returns if there is a critic.

        Args:
            batch: all samples of the step, with what the objective needs of `reference`, `prox` and `values`.
            rewards: those trained on, [groups, samples].
            samples: the batch's own, which know their turns; needed where turns are rewarded.
        """
        chosen, mask = self.algorithm, batch.mask
        penalty = self._penalty(batch)
        if self.turn_discount is not None:
            turns = Turns.of(samples, rewards.flatten(), mask.shape[1]).penalised(penalty)
            return self._by_turn(batch, turns, rewards.shape[1], self.turn_discount)
        if chosen.value_head:
            assert batch.values is not None
            token_rewards = estimators.outcome_rewards(rewards.flatten(), mask) - penalty
            advantages, returns = estimators.gae(token_rewards, batch.values, mask, chosen.gamma, chosen.lam)
            return dataclasses.replace(batch, advantages=estimators.whiten(advantages, mask), returns=returns)
        if chosen.advantage == "reinforce_plus_plus":
            advantages = estimators.reinforce_plus_plus_per_token(rewards.flatten(), mask, penalty)
        else:
            # A response is one action: its penalty is the sum over its tokens.
            penalised = rewards - penalty.sum(-1).view_as(rewards)
            advantages = estimators.ADVANTAGES[chosen.advantage](penalised).flatten()
        return dataclasses.replace(batch, advantages=advantages)

    def _by_turn(self, batch: Batch, turns: Turns, group_size: int, discount: float) -> Batch:
        """`batch` with an advantage of each turn, at all of its tokens."""
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
        """What is taken from the reward of each token, [B, T]."""
        if not self.penalised:
            return torch.zeros(batch.mask.shape)
        assert batch.prox is not None
        assert batch.reference is not None
        estimate = kl(batch.prox, batch.reference, batch.mask, self.algorithm.kl_estimator or "k1")
        return self.algorithm.kl_coefficient * estimate

    def carrying_signal(self, batch: Batch) -> list[int]:
        """The rows that can have a gradient."""
        assert batch.advantages is not None
        trained = batch.mask.any(-1)
        everywhere = self.regularised or self.algorithm.value_head or self.entropy_coef
        if not everywhere and not CORRECTIONS[self.correction].pull:
            advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
            trained &= (advantages != 0).any(-1)
        return trained.nonzero()[:, 0].tolist()

    @property
    def clips_older_policies(self) -> bool:
        """Whether a clip range made for a response's ratio within one step meets ratios against older policies."""
        chosen = self.algorithm
        against_older = CORRECTIONS[self.correction].denominator == "behaviour"
        return against_older and chosen.loss in ("gspo", "gspo_token") and chosen.eps_low < 0.01

    def denominator(self, batch: Batch) -> float:
        """What the sum over an update's rows is divided by, so that micro-batches add up to the whole."""
        if self.algorithm.aggregation == "sequence-mean":
            return len(batch)
        if self.algorithm.aggregation == "constant":
            return len(batch) * self.budget
        return max(int(batch.mask.sum()), 1)

    def loss(self, batch: Batch, logp: Tensor, entropy: Tensor, denominator: float) -> PolicyTerms:
        """What a micro-batch adds to the policy's loss.

        Args:
            logp: log π_θ of each token, [B, T], with gradient.
            entropy: of the distribution each token was drawn from, [B, T], in nats, with gradient.
            denominator: of the whole update.
        """
        chosen, mask, rule = self.algorithm, batch.mask, CORRECTIONS[self.correction]
        assert batch.advantages is not None
        held = recent(mask, batch.ages, self.bounds.get("max_age"))
        prox = logp.detach() if batch.prox is None else batch.prox
        known = batch.behaviour, mask, batch.ages, batch.advantages
        correction = correct(self.correction, logp, prox, *known, **self.bounds)
        clip = {"eps_low": chosen.eps_low, "eps_high": chosen.eps_high}
        if chosen.dual_clip is not None:
            clip["dual_clip"] = chosen.dual_clip
        policy = LOSSES[chosen.loss](logp, correction.old_logprobs, batch.advantages, correction.mask, **clip)
        tokens = policy.loss * correction.weights
        divergence = torch.zeros(mask.shape, device=mask.device)
        if rule.pull:
            tokens = tokens + rule.pull * log_ratio(logp, batch.behaviour, held).square()
        if batch.reference is not None:
            divergence = kl(logp, batch.reference, mask, chosen.kl_estimator or "k3")
        if not self.penalised:
            tokens = tokens + chosen.kl_coefficient * divergence.masked_fill(~held, 0.0)
        if self.entropy_coef:
            tokens = tokens + self.entropy_coef * entropy_bonus(entropy, held)
        met = diagnostics(correction, prox, batch.behaviour, mask, batch.ages, policy.clipped, logp=logp)
        loss = aggregate(tokens, mask, chosen.aggregation, denominator)
        return PolicyTerms(loss, (entropy.detach() * mask).sum(), divergence.detach().sum(), met)

    def value_loss(self, batch: Batch, values: Tensor, tokens: int) -> Tensor:
        """What a micro-batch adds to the critic's loss, the mean over the update's trained `tokens`.

        Args:
            values: the critic's of each token, [B, T], with gradient.
        """
        assert batch.values is not None
        assert batch.returns is not None
        terms = value_clip(values, batch.values, batch.returns, batch.mask, self.value_clip)
        return aggregate(terms, batch.mask, "token-mean", tokens)


def resolve(name: str, correction: CorrectionKind, own: Mapping[str, Any]) -> Algorithm:
    """The algorithm called `name` beside a correction, with one's `own` settings in place of the published ones.

    Args:
        own: settings by their names in `Algorithm`; None stands for the published one.

    Raises:
        ValueError: there is no such algorithm.
    """
    chosen = algorithm(name)
    if CORRECTIONS[correction].replaces_clip and chosen.loss == "ppo_clip":
        chosen = dataclasses.replace(chosen, eps_low=UNBOUNDED, eps_high=UNBOUNDED)
    return dataclasses.replace(chosen, **{setting: value for setting, value in own.items() if value is not None})
