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
    """Turns of a batch's episodes and their rewards, at most K turns per episode."""

    index: Tensor
    """Turn of the next token, from 0, [B, T - 1]; -1 for environment tokens. Turns of an episode of several sequences
    are numbered in the order of their requests."""
    rewards: Tensor
    """Reward of each turn, [episodes, K]; 0 after an episode's last turn."""
    episodes: Tensor | None = None
    """Number of each row's episode, [B]; None: each row is an episode."""

    @classmethod
    def of(cls, samples: Sequence[Sample], rewards: Tensor, width: int, episodes: Tensor | None = None) -> TurnRewards:
        """Collect the turns of `samples`.

        Args:
            rewards: reward that each episode is trained on, [episodes].
            width: T - 1 of the batch.
            episodes: number of each sample's episode, [B]; None: each sample is an episode.
        """
        index = np.full((len(samples), width), -1, dtype=np.int64)
        numbers = [_turn_numbers(sample) for sample in samples]
        most = 1 + max((number for own in numbers for number in own), default=0)
        table = torch.zeros((len(rewards), most), dtype=torch.float64)
        last = np.zeros(len(rewards), dtype=np.int64)
        for row, sample in enumerate(samples):
            episode = row if episodes is None else int(episodes[row])
            begins = np.array([one.start + one.tokens for one in sample.transitions] or [0])
            turn = np.searchsorted(begins, np.arange(sample.length), "right") - 1
            first = len(sample.prompt_ids) - 1
            own = np.where(sample.versions != ENVIRONMENT, np.array(numbers[row])[turn], -1)
            index[row, first : first + sample.length] = own
            # The first transition starts the sequence, and rewards no turn.
            for number, transition in zip(numbers[row], sample.transitions[1:], strict=False):
                table[episode, number] += transition.reward
            last[episode] = max(last[episode], own.max(initial=0))
        # A task's reward or a length penalty belongs to no turn: the last turn gets the difference.
        table[np.arange(len(rewards)), last] += rewards.double() - table.sum(-1)
        answered = [number for own, sample in zip(numbers, samples, strict=True) for number in own[: sample.turns]]
        used = 1 + max(int(index.max(initial=0)), max(answered, default=0))
        return cls(torch.from_numpy(index), table[:, :used].float(), episodes)

    def penalised(self, penalty: Tensor) -> TurnRewards:
        """Subtract a penalty per token, [B, T - 1], from the rewards of the tokens' turns."""
        taken = penalty.masked_fill(self.index < 0, 0.0).to(self.rewards.dtype)
        rows = torch.arange(len(self.index)) if self.episodes is None else self.episodes
        places = rows[:, None] * self.rewards.shape[1] + self.index.clamp(min=0)
        left = self.rewards.flatten().index_add(0, places.flatten(), -taken.flatten())
        return TurnRewards(self.index, left.view_as(self.rewards), self.episodes)

    def spread(self, values: Tensor) -> Tensor:
        """Copy a value per turn, [episodes, K], to each token of the turn, [B, T - 1]; 0 for environment tokens."""
        values = values if self.episodes is None else values[self.episodes]
        return values.gather(1, self.index.clamp(min=0)).masked_fill(self.index < 0, 0.0)


def _turn_numbers(sample: Sample) -> list[int]:
    """Number of each of the sample's turns in its episode."""
    asked = [one.number for one in sample.transitions if one.number is not None]
    return asked or list(range(max(len(sample.transitions), 1)))


def rewards_to_go(rewards: Tensor, discount: float) -> Tensor:
    """G_k = Σ_{j ≥ k} discount^(j - k) r_j, [episodes, K] -> [episodes, K]."""
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
        turns: turns of episodes of one sequence each: the value after a turn is at the next turn of its row.
        values: value head's estimate before each token, [B, T - 1].

    Returns:
        advantages and returns (A_k + V_k) at each token of turn k, both [B, T - 1], 0 for environment tokens.
    """
    assert turns.episodes is None, "values over turns need episodes of one sequence"
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
