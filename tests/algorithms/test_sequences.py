"""An episode of several sequences weighs as an episode, in advantages and in the loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april import FinishReason, Group, Prompt, SamplingParams
from april.algorithms.batch import Batch
from april.algorithms.catalogue import algorithm
from april.algorithms.objective import Objective
from april.rollout.trajectory.transition import Origin, Transition

LENGTHS = st.lists(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=2, max_size=3), min_size=1, max_size=3
)
"""Groups of episodes, each the lengths of its sequences."""


def groups_of(shape: list[list[list[int]]]) -> list[Group]:
    groups = []
    for id, episodes in enumerate(shape):
        group = Group.start(id, Prompt((1, 2, 3)), len(episodes), SamplingParams(99, max_turns=9), 0)
        number = [0] * len(episodes)
        # In turn, as episodes do that are drawn side by side.
        for place in range(max(map(len, episodes))):
            for episode, lengths in enumerate(episodes):
                if place >= len(lengths):
                    continue
                index = episode if place == 0 else group.next_index
                asked = Transition(0, 0, number=number[episode], request={"messages": [], "after": None})
                group.branch(index, episode, Origin(), (4,) * (place + 1), asked)
                sample = group.sample(index)
                sample.extend([5] * lengths[place], [-1.0] * lengths[place], 0, FinishReason.STOP)
                number[episode] += 1
        for episode, one in enumerate(group.episodes):
            for sample in one:
                last = sample is one[-1]
                end = Transition(sample.length, 0, episode / 4 if last else 0.0, last)
                sample.observe((), end, FinishReason.DONE)
                sample.reward = episode / 4
        groups.append(group)
    return groups


def rewards_of(groups: list[Group]) -> torch.Tensor:
    size = min(group.size for group in groups)
    return torch.tensor([[sample.reward for sample in group.outcomes[:size]] for group in groups])


@given(LENGTHS, st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]))
def test_advantages_count_episodes(shape: list[list[list[int]]], name: str) -> None:
    shape = [group[:2] for group in shape]
    groups = groups_of(shape)
    samples = [sample for group in groups for sample in group.samples]
    objective = Objective(dataclasses.replace(algorithm(name), kl_coefficient=0.0), 99)
    batch = objective.with_advantages(Batch.of(samples, 0), rewards_of(groups), samples)
    whole = groups_of([[lengths[:1] for lengths in group] for group in shape])
    alone = [sample for group in whole for sample in group.samples]
    expected = objective.with_advantages(Batch.of(alone, 0), rewards_of(whole), alone).advantages
    assert batch.advantages is not None
    assert expected is not None
    by_episode = {(s.group_id, s.episode): float(a) for s, a in zip(alone, expected, strict=True)}
    for sample, advantage in zip(samples, batch.advantages, strict=True):
        assert float(advantage) == pytest.approx(by_episode[sample.group_id, sample.episode], abs=1e-6)


@given(LENGTHS, st.sampled_from(["sequence-mean", "token-mean", "constant"]), st.integers(0, 99))
def test_an_episode_weighs_as_one_or_by_its_tokens(shape: list[list[list[int]]], aggregation: str, seed: int) -> None:
    """Written out over tokens; micro-batches of single rows add up to the same."""
    shape = [group[:2] for group in shape]
    groups = groups_of(shape)
    samples = [sample for group in groups for sample in group.samples]
    chosen = dataclasses.replace(algorithm("grpo"), aggregation=aggregation, kl_coefficient=0.0)
    objective = Objective(chosen, 7)
    batch = objective.with_advantages(Batch.of(samples, 0), rewards_of(groups), samples)
    denominator = objective.denominator(batch)
    zeros = torch.zeros(batch.mask.shape)
    # Other ratios in each episode: with equal ones, advantages would cancel.
    offsets = torch.tensor([0.01 * ((seed + 3 * s.episode + s.group_id) % 7) for s in samples])
    logp = torch.where(batch.mask, batch.rollout_logprobs + offsets[:, None], zeros)
    whole = objective.loss(batch, logp, zeros, denominator).loss
    parts = []
    for row in range(len(batch)):
        micro = batch.rows([row])
        own = logp[row : row + 1, : micro.mask.shape[1]]
        parts.append(objective.loss(micro, own, torch.zeros(micro.mask.shape), denominator).loss)
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-5)
    assert batch.advantages is not None
    tokens: dict[tuple[int, int], int] = {}
    for sample in samples:
        key = sample.group_id, sample.episode
        tokens[key] = tokens.get(key, 0) + sample.policy_tokens
    weights = {"sequence-mean": lambda key: 1 / tokens[key] / len(tokens), "constant": lambda key: 1 / 7 / len(tokens)}
    weigh = weights.get(aggregation, lambda key: 1 / sum(tokens.values()))
    expected = sum(
        -float(advantage) * float(offset.exp()) * sample.policy_tokens * weigh((sample.group_id, sample.episode))
        for sample, advantage, offset in zip(samples, batch.advantages, offsets, strict=True)
    )
    assert float(whole) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@given(LENGTHS, st.floats(0, 1))
def test_turns_are_numbered_over_all_sequences_of_an_episode(shape: list[list[list[int]]], discount: float) -> None:
    """Only the last turn is rewarded, so a turn's advantage depends on the number of turns after it."""
    shape = [[lengths[:1] * len(group[0]) for lengths in group[:2]] for group in shape]
    groups = groups_of(shape)
    samples = [sample for group in groups for sample in group.samples]
    chosen = dataclasses.replace(algorithm("dr_grpo"), kl_coefficient=0.0)
    objective = Objective(chosen, 99, turn_discount=discount)
    batch = objective.with_advantages(Batch.of(samples, 0), rewards_of(groups), samples)
    assert batch.advantages is not None
    for row, sample in enumerate(samples):
        episode = groups[sample.group_id].episodes[sample.episode]
        after = len(episode) - 1 - (sample.transitions[0].number or 0)
        # Two episodes of equal numbers of turns with rewards 0 and 1/4.
        expected = (0.125 if sample.episode else -0.125) * discount**after
        own = batch.advantages[row][batch.mask[row]]
        assert own.tolist() == pytest.approx([expected] * sample.policy_tokens, abs=1e-6)
