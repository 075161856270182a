"""Rewards by turn: what each turn of an episode is worth, instead of the episode as a whole.

Invariants:
- all tokens of a turn have one advantage: the turn is the action;
- an episode of one turn has the advantage of its outcome, whatever the discount;
- the rewards of an episode's turns add up to the reward that is trained on: what is not any turn's own (a task's
  reward, a penalty for length) comes with the last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from april.algorithms.ratios import at_least_float32
from april.rollout.trajectory import ENVIRONMENT, Sample


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a batch's samples, at most K each."""

    index: Tensor
    """Which turn the next token belongs to, from 0; -1 where no policy sampled it. [B, T - 1]."""
    rewards: Tensor
    """Of each turn, 0 behind the last, [B, K]."""

    @classmethod
    def of(cls, samples: Sequence[Sample], rewards: Tensor, width: int) -> Turns:
        """Those of `samples`.

        Args:
            rewards: what each sample is trained on, [B].
            width: T - 1 of the batch.
        """
        index = np.full((len(samples), width), -1, dtype=np.int64)
        given = [[transition.reward for transition in sample.transitions[1:]] for sample in samples]
        table = torch.zeros((len(samples), 1 + max(map(len, given), default=0)))
        for row, sample in enumerate(samples):
            begins = np.array([one.start + one.tokens for one in sample.transitions] or [0])
            turn = np.searchsorted(begins, np.arange(sample.length), "right") - 1
            first = len(sample.prompt_ids) - 1
            own = np.where(sample.versions != ENVIRONMENT, turn, -1)
            index[row, first : first + sample.length] = own
            table[row, : len(given[row])] = torch.tensor(given[row])
            table[row, max(int(own.max(initial=0)), 0)] += float(rewards[row]) - sum(given[row])
        most = max(int(index.max(initial=0)) + 1, *map(len, given), 1)
        return cls(torch.from_numpy(index), table[:, :most])

    def penalised(self, penalty: Tensor) -> Turns:
        """With what is taken from the reward of each token, [B, T - 1], taken from its turn's."""
        taken = penalty.masked_fill(self.index < 0, 0.0)
        return Turns(self.index, self.rewards.scatter_add(1, self.index.clamp(min=0), -taken.to(self.rewards.dtype)))

    def spread(self, values: Tensor) -> Tensor:
        """A value for each turn, [B, K], at each of its tokens, [B, T - 1]; 0 outside."""
        return values.gather(1, self.index.clamp(min=0)).masked_fill(self.index < 0, 0.0)


def rewards_to_go(rewards: Tensor, discount: float) -> Tensor:
    """G_k = Σ_{j ≥ k} discount^(j - k) r_j, [B, K] -> [B, K]."""
    to_go = at_least_float32(rewards).clone()
    for k in reversed(range(rewards.shape[1] - 1)):
        to_go[:, k] += discount * to_go[:, k + 1]
    return to_go


def turn_advantages(turns: Turns, group_size: int, discount: float, estimate: Callable[[Tensor], Tensor]) -> Tensor:
    """The advantage of each token by its turn's reward to go, [B, T - 1].

    Turn k is compared with turn k of the group's other samples. One that has ended has 0 to go.

    Args:
        estimate: a group estimator, [groups, samples] -> [groups, samples].
    """
    to_go = rewards_to_go(turns.rewards, discount)
    columns = [estimate(column.view(-1, group_size)).flatten() for column in to_go.unbind(1)]
    return turns.spread(torch.stack(columns, 1))


@torch.no_grad()
def gae_over_turns(turns: Turns, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation whose steps are turns: A_k = δ_k + γλ A_{k+1}, δ_k = r_k + γ V_{k+1} - V_k, with
    V_k the value before the first token of turn k, and 0 behind the last.

    Args:
        values: the value head's estimate before each token, [B, T - 1].

    Returns:
        advantages and returns (A_k + V_k) at each token of turn k, both [B, T - 1], 0 outside.
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
