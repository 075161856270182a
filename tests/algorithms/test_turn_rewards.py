"""Rewards by turn, against the formulas written out in NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april import FinishReason, Group, Prompt, SamplingParams
from april.algorithms import advantages as estimators
from april.algorithms.batch import Batch
from april.algorithms.catalogue import algorithm
from april.algorithms.objective import Objective
from april.algorithms.turn_rewards import TurnRewards, gae_over_turns, rewards_to_go, turn_advantages
from april.rollout.trajectory.transition import Transition
from tests.algorithms.reference import STEADY

SHAPES = st.lists(
    st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(-8, 8)), min_size=1, max_size=4),
        min_size=2,
        max_size=2,
    ),
    min_size=1,
    max_size=3,
)
"""Groups of two samples; each a list of turns: policy tokens, the observation's behind it, 8 times the reward."""


def episodes(shapes: list[list[list[tuple[int, int, int]]]]) -> list[Group]:
    groups = []
    for id, samples in enumerate(shapes):
        group = Group.start(id, Prompt((1, 2, 3)), len(samples), SamplingParams(99, max_turns=9), 0)
        for sample, turns in zip(group.samples, samples, strict=True):
            sample.observe([7], Transition(0, 1))
            for number, (spoken, heard, reward) in enumerate(turns):
                sample.extend([5] * spoken, [-1.0] * spoken, 0, FinishReason.STOP)
                last = number == len(turns) - 1
                ids = [] if last else [8] * heard
                sample.observe(
                    ids, Transition(sample.length, len(ids), reward / 8), FinishReason.DONE if last else None
                )
            sample.reward = sum(reward / 8 for _, _, reward in turns)
        groups.append(group)
    return groups


def per_token(turns: list[tuple[int, int, int]], values: np.ndarray, width: int) -> np.ndarray:
    """A value of each turn at its tokens, which begin behind a prompt of 3 and an observation of 1."""
    row, at = np.zeros(width), 3
    for (spoken, heard, _), value in zip(turns, values, strict=True):
        row[at : at + spoken] = value
        at += spoken + heard
    return row


@STEADY
@given(SHAPES, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_turns_are_compared_by_their_rewards_to_go(shapes, discount, name) -> None:
    groups = episodes(shapes)
    samples = [sample for group in groups for sample in group.samples]
    batch = Batch.of(samples, 0)
    rewards = torch.tensor([[sample.reward for sample in group.samples] for group in groups])
    found = TurnRewards.of(samples, rewards.flatten(), batch.mask.shape[1])
    assert ((found.index >= 0) == batch.mask).all()

    most = max(len(turns) for group in shapes for turns in group)
    to_go = np.zeros((len(samples), most))
    for row, turns in enumerate(turns for group in shapes for turns in group):
        for k in range(len(turns)):
            to_go[row, k] = sum(discount ** (j - k) * turns[j][2] / 8 for j in range(k, len(turns)))
    np.testing.assert_allclose(rewards_to_go(found.rewards, discount), to_go, atol=1e-6)

    wanted = np.zeros(batch.mask.shape)
    for g, group in enumerate(shapes):
        both = to_go[2 * g : 2 * g + 2]
        centred = both - both.mean(0)
        scale = {"grpo": both.std(0, ddof=1) + 1e-6, "dr_grpo": 1.0, "rloo": 0.5}[name]
        for row, turns in enumerate(group):
            values = (centred / scale)[row, : len(turns)]
            wanted[2 * g + row] = per_token(turns, values, wanted.shape[1])
    got = turn_advantages(found, 2, discount, estimators.ADVANTAGES[name])
    np.testing.assert_allclose(got, wanted, atol=2e-4)


@STEADY
@given(SHAPES, st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.9, 1.0]), st.integers(0, 99))
def test_gae_takes_a_turn_as_a_step(shapes, gamma, lam, seed) -> None:
    groups = episodes(shapes)
    samples = [sample for group in groups for sample in group.samples]
    batch = Batch.of(samples, 0)
    values = np.random.default_rng(seed).normal(size=batch.mask.shape).astype(np.float32)
    totals = torch.tensor([sample.reward for sample in samples])
    found = TurnRewards.of(samples, totals, batch.mask.shape[1])
    advantages, returns = gae_over_turns(found, torch.from_numpy(values), gamma, lam)
    for row, turns in enumerate(turns for group in shapes for turns in group):
        begins = 3 + np.cumsum([0, *[spoken + heard for spoken, heard, _ in turns[:-1]]])
        v = [*values[row, begins], 0.0]
        deltas = [turns[k][2] / 8 + gamma * v[k + 1] - v[k] for k in range(len(turns))]
        wanted = [sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(turns))) for k in range(len(turns))]
        np.testing.assert_allclose(advantages[row], per_token(turns, np.array(wanted), values.shape[1]), atol=1e-5)
        both = np.array(wanted) + values[row, begins]
        np.testing.assert_allclose(returns[row], per_token(turns, both, values.shape[1]), atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "ppo", "rloo"])
def test_an_episode_of_one_turn_has_the_advantage_of_its_reward(name: str) -> None:
    groups = episodes([[[(3, 0, 4)], [(2, 0, 1)]], [[(1, 0, 0)], [(4, 0, 8)]]])
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([[sample.reward for sample in group.samples] for group in groups])
    chosen = dataclasses.replace(algorithm(name), kl_coefficient=0.0, gamma=1.0, lam=1.0)
    batch = Batch.of(samples, 0)
    if chosen.value_head:
        batch = dataclasses.replace(batch, values=torch.zeros(batch.mask.shape))
    whole = Objective(chosen, 99).with_advantages(batch, rewards).advantages
    turns = Objective(chosen, 99, turn_discount=0.7).with_advantages(batch, rewards, samples).advantages
    assert whole is not None
    assert turns is not None
    whole = whole if whole.dim() == 2 else whole[:, None] * batch.mask
    torch.testing.assert_close(turns, whole * batch.mask, atol=1e-5, rtol=1e-4)


def test_reward_without_a_turn_is_added_to_the_last_turn() -> None:
    (group,) = episodes([[[(1, 1, 4), (2, 0, 0)], [(1, 0, 8)]]])
    found = TurnRewards.of(group.samples, torch.tensor([2.5, 1.0]), 9)
    assert found.rewards.tolist() == [[0.5, 2.0], [1.0, 0.0]]
