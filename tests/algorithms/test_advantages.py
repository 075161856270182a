from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april.algorithms import advantages
from april.algorithms.advantages import ADVANTAGES
from tests.algorithms import reference
from tests.algorithms.reference import STEADY

GROUPED = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]


def expected(name: str, groups: list[np.ndarray]) -> list[np.ndarray]:
    """Each estimator from its paper, on a list of groups that may differ in size (all at least 2)."""
    if name == "grpo":
        return [(g - g.mean()) / (g.std(ddof=1) + 1e-6) for g in groups]
    if name == "dr_grpo":
        return [g - g.mean() for g in groups]
    if name == "rloo":
        return [np.array([r - np.delete(g, i).mean() for i, r in enumerate(g)]) for g in groups]
    if name == "reinforce_plus_plus_baseline":
        centred = [g - g.mean() for g in groups]
        return [c / (np.concatenate(centred).std(ddof=1) + 1e-8) for c in centred]
    everything = np.concatenate(groups)
    return [(g - everything.mean()) / (everything.std(ddof=1) + 1e-8) for g in groups]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_match_the_paper_on_groups_of_equal_size(name: str) -> None:
    rewards = np.random.default_rng(0).normal(size=(5, 4))
    wanted = np.stack(expected(name, list(rewards)))
    got = ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float32))
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
@STEADY
@given(sizes=st.lists(st.integers(2, 5), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_matches_the_paper_on_groups_of_any_size_in_any_order(name: str, sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [rng.normal(size=size) for size in sizes]
    ids = np.repeat(rng.choice(1000, len(sizes), replace=False) - 500, sizes)
    order = rng.permutation(len(ids))
    rewards, wanted = np.concatenate(groups)[order], np.concatenate(expected(name, groups))[order]
    got = ADVANTAGES[name](torch.tensor(rewards), torch.tensor(ids[order]))
    np.testing.assert_allclose(got, wanted, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
@STEADY
@given(reward=st.floats(-100, 100, width=32), samples=st.integers(1, 33))
def test_equal_rewards_are_exactly_zero(name: str, reward: float, samples: int) -> None:
    assert not ADVANTAGES[name](torch.full((3, samples), reward)).any()


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_equal_rewards_contributes_no_gradient(name: str) -> None:
    got = ADVANTAGES[name](torch.tensor([[0.1, 0.1, 0.1], [0.7, 0.0, 1.0]]))
    assert not got[0].any()
    assert got[1].abs().min() > 0


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_no_baseline_and_no_advantage(name: str) -> None:
    got = ADVANTAGES[name](torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 9]))
    assert got[2] == 0
    assert got[0] > 0 > got[1]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_integer_rewards_are_accepted(name: str) -> None:
    assert ADVANTAGES[name](torch.tensor([[0, 1]])).dtype == torch.float32


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_samples_have_no_advantages(name: str) -> None:
    assert ADVANTAGES[name](torch.zeros(0, 4)).shape == (0, 4)


def test_flat_rewards_need_their_groups() -> None:
    with pytest.raises(ValueError, match="need group_ids"):
        advantages.grpo(torch.zeros(4))
    with pytest.raises(ValueError, match="one id per reward"):
        advantages.grpo(torch.zeros(4), torch.zeros(3))


@STEADY
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(0, 7)),
    seed=st.integers(0, 2**16),
    gamma=st.floats(0.5, 1.0),
    lam=st.floats(0.0, 1.0),
)
def test_gae_is_the_discounted_sum_of_errors(shape: tuple[int, int], seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values, bootstrap = rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=shape[0])
    mask = rng.random(shape) < 0.7
    rewards = rewards * mask
    wanted = reference.gae(rewards, values, mask, gamma, lam, bootstrap)
    got = advantages.gae(*map(torch.tensor, (rewards, values, mask)), gamma, lam, torch.tensor(bootstrap))
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-9)
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-9)


def test_gae_ignores_values_outside_the_mask() -> None:
    mask = torch.tensor([[True, False, True, False]])
    nan = float("nan")
    got, returns = advantages.gae(torch.tensor([[0.0, nan, 1.0, nan]]), torch.tensor([[0.5, nan, 0.25, nan]]), mask)
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.0, 0.75, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.0, 0.0, 1.0, 0.0]]))


def test_outcome_reward_lands_on_the_last_trained_token() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    got = advantages.outcome_rewards(torch.tensor([2.0, 3.0, 5.0]), mask)
    assert got.tolist() == [[0, 0, 0, 2, 0], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]]


def test_reinforce_plus_plus_sums_future_penalties() -> None:
    rng = np.random.default_rng(3)
    rewards, penalty, mask = rng.normal(size=3), rng.normal(size=(3, 5)), rng.random((3, 5)) < 0.6
    to_go = np.zeros((3, 5))
    for i in range(3):
        for t in reference.trained(mask, i):
            to_go[i, t] = rewards[i] - sum(penalty[i, u] for u in reference.trained(mask, i) if u >= t)
    wanted = np.where(mask, (to_go - to_go[mask].mean()) / (to_go[mask].std(ddof=1) + 1e-8), 0.0)
    got = advantages.reinforce_plus_plus_per_token(*map(torch.tensor, (rewards, mask, penalty)))
    np.testing.assert_allclose(got, wanted, atol=1e-9)


def test_no_gradient_flows_through_values_or_penalties() -> None:
    live, mask = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    assert not any(x.requires_grad for x in advantages.gae(torch.zeros(2, 3), live, mask))
    assert not advantages.reinforce_plus_plus_per_token(torch.tensor([1.0, 0.0]), mask, live).requires_grad


def test_whitening_an_empty_batch_gives_an_empty_batch() -> None:
    assert not advantages.whiten(torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool)).any()
