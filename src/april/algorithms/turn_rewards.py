"""Rewards and advantages per turn of an episode, instead of per episode.

Invariants:
- all tokens of a turn have one advantage: the turn is the action;
- an episode of one turn has the advantage of its outcome, for every discount;
- the rewards of an episode's turns add up to the reward that is trained on: parts that belong to no turn (a task's
  reward, a penalty for length) are added to the last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from april.algorithms.ratios import at_least_float32
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.segment import ENVIRONMENT


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """Turns of a batch's samples and their rewards, at most K turns per sample."""

    index: Tensor
    """Turn of the next token, from 0, [B, T - 1]; -1 for environment tokens."""
    rewards: Tensor
    """Reward of each turn, [B, K]; 0 after a sample's last turn."""

    @classmethod
    def of(cls, samples: Sequence[Sample], rewards: Tensor, width: int) -> TurnRewards:
        """Collect the turns of `samples`.

        Args:
            rewards: reward that each sample is trained on, [B].
            width: T - 1 of the batch.
        """
        index = np.full((len(samples), width), -1, dtype=np.int64)
        # The first transition is the reset, which rewards no turn.
        given = [[transition.reward for transition in sample.transitions[1:]] for sample in samples]
        table = torch.zeros((len(samples), 1 + max(map(len, given), default=0)))
        for row, sample in enumerate(samples):
            begins = np.array([one.start + one.tokens for one in sample.transitions] or [0])
            turn = np.searchsorted(begins, np.arange(sample.length), "right") - 1
            first = len(sample.prompt_ids) - 1
            own = np.where(sample.versions != ENVIRONMENT, turn, -1)
            index[row, first : first + sample.length] = own
            table[row, : len(given[row])] = torch.tensor(given[row])
            # A task's reward or a length penalty belongs to no turn: the last turn gets the difference.
            table[row, max(int(own.max(initial=0)), 0)] += float(rewards[row]) - sum(given[row])
        most = max(int(index.max(initial=0)) + 1, *map(len, given), 1)
        return cls(torch.from_numpy(index), table[:, :most])

    def penalised(self, penalty: Tensor) -> TurnRewards:
        """Subtract a penalty per token, [B, T - 1], from the rewards of the tokens' turns."""
        taken = penalty.masked_fill(self.index < 0, 0.0)
        return TurnRewards(
            self.index, self.rewards.scatter_add(1, self.index.clamp(min=0), -taken.to(self.rewards.dtype))
        )

    def spread(self, values: Tensor) -> Tensor:
        """Copy a value per turn, [B, K], to each token of the turn, [B, T - 1]; 0 for environment tokens."""
        return values.gather(1, self.index.clamp(min=0)).masked_fill(self.index < 0, 0.0)


def rewards_to_go(rewards: Tensor, discount: float) -> Tensor:
    """G_k = Σ_{j ≥ k} discount^(j - k) r_j, [B, K] -> [B, K]."""
    to_go = at_least_float32(rewards).clone()
    for k in reversed(range(rewards.shape[1] - 1)):
        to_go[:, k] += discount * to_go[:, k + 1]
    return to_go


def turn_advantages(
    turns: TurnRewards, group_size: int, discount: float, estimate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return each token's advantage, estimated from the reward to go of its turn, [B, T - 1].

    The baseline of turn k is turn k of the group's other samples; an episode that has ended has reward to go 0.

    Args:
        estimate: group estimator, [groups, samples] -> [groups, samples].
    """
    to_go = rewards_to_go(turns.rewards, discount)
    columns = [estimate(column.view(-1, group_size)).flatten() for column in to_go.unbind(1)]
    return turns.spread(torch.stack(columns, 1))


@torch.no_grad()
def gae_over_turns(turns: TurnRewards, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over turns: A_k = δ_k + γλ A_{k+1}, δ_k = r_k + γ V_{k+1} - V_k, where V_k is
    the value before the first token of turn k, and 0 after the last turn.

    Args:
        values: value head's estimate before each token, [B, T - 1].

    Returns:
        advantages and returns (A_k + V_k) at each token of turn k, both [B, T - 1], 0 for environment tokens.
    """
    values, rewards = at_least_float32(values), at_least_float32(turns.rewards)
    next_value = running = values.new_zeros(len(values))
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for k in reversed(range(rewards.shape[1])):
        own = turns.index == k
        there = own.any(-1)
        first = own.int().argmax(-1, keepdim=True)
        value = values.gather(1, first)[:, 0]
        delta = rewards[:, k] + gamma * next_value - value
        running = torch.where(there, delta + gamma * lam * running, running)
        next_value = torch.where(there, value, next_value)
        advantages[:, k], returns[:, k] = running, running + value
    return turns.spread(advantages), turns.spread(returns)
