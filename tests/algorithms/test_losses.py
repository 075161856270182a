from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april.algorithms import dapo, losses
from april.algorithms.losses import LOSSES, aggregate
from april.algorithms.ratios import LOG_RATIO_LIMIT
from tests.algorithms import reference
from tests.algorithms.reference import STEADY

INF = float("inf")
CASES = {
    "ppo_clip": (losses.ppo_clip, reference.ppo_clip, {"eps_low": 0.2, "eps_high": 0.28}),
    "ppo_clip dual": (losses.ppo_clip, reference.ppo_clip, {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": 1.5}),
    "ppo_clip unbounded": (losses.ppo_clip, reference.ppo_clip, {"eps_low": INF, "eps_high": INF}),
    "gspo": (losses.gspo, reference.gspo, {"eps_low": 0.05, "eps_high": 0.1}),
    "gspo_token": (losses.gspo_token, reference.gspo_token, {"eps_low": 0.05, "eps_high": 0.1}),
    "cispo": (losses.cispo, reference.cispo, {"eps_low": INF, "eps_high": 0.3}),
    "cispo two-sided": (losses.cispo, reference.cispo, {"eps_low": 0.2, "eps_high": 0.3}),
}
MODES = ["token-mean", "sequence-mean", "constant"]


def batch(shape: tuple[int, int], seed: int, spread: float = 0.4) -> tuple[np.ndarray, ...]:
    """Log-probabilities under the current and the old policy, one advantage per sequence, and a mask with holes."""
    rng = np.random.default_rng(seed)
    logp = -rng.random(shape) * 3 - 0.01
    old = logp + rng.normal(size=shape) * spread
    return logp, old, rng.normal(size=shape[0]), rng.random(shape) < 0.7


shapes = st.tuples(st.integers(1, 4), st.integers(0, 6))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@STEADY
@given(shape=shapes, seed=st.integers(0, 2**16))
def test_value_and_gradient_match_the_paper(case: str, mode: str, shape: tuple[int, int], seed: int) -> None:
    loss, paper, bounds = CASES[case]
    logp, old, advantages, mask = batch(shape, seed)
    per_token = np.broadcast_to(advantages[:, None], shape)

    def scalar(live: np.ndarray) -> float:
        return reference.aggregate(paper(live, logp, old, per_token, mask, **bounds), mask, mode, 7.0)

    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-5)):
        live = torch.tensor(logp, dtype=dtype, requires_grad=True)
        result = loss(live, torch.tensor(old, dtype=dtype), torch.tensor(advantages), torch.tensor(mask), **bounds)
        got = aggregate(result.loss, torch.tensor(mask), mode, 7.0)
        (gradient,) = torch.autograd.grad(got, live)
        np.testing.assert_allclose(got.item(), scalar(logp), atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(gradient, reference.gradient(scalar, logp), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_value_and_gradient(estimator: str) -> None:
    logp, ref, advantages, mask = batch((3, 5), 1)

    def scalar(live: np.ndarray) -> float:
        return float(reference.kl(live, logp, ref, advantages, mask, estimator).sum())

    live = torch.tensor(logp, requires_grad=True)
    chosen = {} if estimator == "k3" else {"estimator": estimator}  # GRPO's is the default
    got = losses.kl(live, torch.tensor(ref), torch.tensor(mask), **chosen).sum()
    got.backward()
    np.testing.assert_allclose(got.item(), scalar(logp), atol=1e-9)
    np.testing.assert_allclose(live.grad, reference.gradient(scalar, logp), atol=1e-7)


def test_token_advantages_reach_their_tokens() -> None:
    logp, old, _, mask = batch((3, 5), 2)
    advantages = np.random.default_rng(2).normal(size=(3, 5))
    for name in ("ppo_clip", "gspo_token", "cispo"):
        loss, paper, bounds = CASES[name]
        got = loss(*map(torch.tensor, (logp, old, advantages, mask)), **bounds).loss
        np.testing.assert_allclose(got, paper(logp, logp, old, advantages, mask, **bounds), atol=1e-9)


def test_gspo_takes_one_advantage_per_sequence() -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="use gspo_token"):
        losses.gspo(zeros, zeros, zeros, zeros.bool())


def test_gspo_token_has_the_gradient_of_gspo_for_sequence_advantages() -> None:
    logp, old, advantages, mask = map(torch.tensor, batch((4, 6), 5, spread=0.01))
    gradients = []
    for loss in (losses.gspo, losses.gspo_token):
        live = logp.clone().requires_grad_()
        aggregate(loss(live, old, advantages, mask).loss, mask, "sequence-mean").backward()
        gradients.append(live.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients)


def test_clipped_tokens_have_no_gradient() -> None:
    logp, old, advantages, mask = map(torch.tensor, batch((6, 8), 3))
    logp.requires_grad_()
    result = losses.ppo_clip(logp, old, advantages, mask, dual_clip=1.2)
    result.loss.sum().backward()
    assert result.clipped.any()
    assert torch.equal(result.clipped, mask & (logp.grad == 0))


def test_cispo_marks_bounded_weights() -> None:
    logp, old, advantages, mask = map(torch.tensor, batch((6, 8), 3))
    result = losses.cispo(logp, old, advantages, mask, eps_low=0.2, eps_high=0.3)
    ratio = (logp - old).exp()
    assert torch.equal(result.clipped, mask & ((ratio < 0.8) | (ratio > 1.3)))
    assert result.clipped.any()


def test_no_gradient_reaches_the_old_policy_or_the_advantages_through_a_loss() -> None:
    logp, old, advantages, mask = map(torch.tensor, batch((2, 3), 4))
    advantages.requires_grad_()
    for loss in LOSSES.values():
        assert not loss(logp, old, advantages, mask).loss.requires_grad


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_masking_everything_is_zero_with_zero_gradients(name: str, mode: str) -> None:
    logp = torch.full((2, 3), float("nan"), requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    result = LOSSES[name](logp, torch.full((2, 3), -INF), torch.ones(2), mask)
    loss = aggregate(result.loss, mask, mode, 0 if mode == "constant" else None)
    loss.backward()
    assert loss.item() == 0
    assert logp.grad.tolist() == [[0.0] * 3] * 2
    assert not result.clipped.any()
    assert (result.ratio == 1).all()


@pytest.mark.parametrize("name", LOSSES)
def test_values_of_padding_have_no_effect(name: str) -> None:
    logp, old, advantages, mask = map(torch.tensor, batch((3, 6), 6))
    clean = aggregate(LOSSES[name](logp, old, advantages, mask).loss, mask)
    for rubbish in (float("nan"), INF, -INF):
        live = logp.masked_fill(~mask, rubbish).requires_grad_()
        result = LOSSES[name](live, old.masked_fill(~mask, -rubbish), advantages, mask)
        loss = aggregate(result.loss, mask)
        loss.backward()
        assert not result.loss[~mask].any()
        assert not result.clipped[~mask].any()
        assert (result.ratio[~mask] == 1).all()
        assert loss == clean
        assert live.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_response_and_one_of_a_single_token(name: str, mode: str) -> None:
    mask = torch.tensor([[False, False], [True, False]])
    live = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    loss = aggregate(LOSSES[name](live, live.detach(), torch.tensor([9.0, 2.0]), mask).loss, mask, mode, 1.0)
    loss.backward()
    assert live.grad.tolist() == [[0.0, 0.0], [-2.0, 0.0]]


def test_zero_advantage_is_zero_loss_and_gradient() -> None:
    logp, old, _, mask = map(torch.tensor, batch((3, 6), 7, spread=3.0))
    for loss in LOSSES.values():
        live = logp.clone().requires_grad_()
        result = loss(live, old, torch.zeros(3), mask)
        result.loss.sum().backward()
        assert not result.loss.any()
        assert not live.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*LOSSES, "dual", "k1", "k2", "k3"])
def test_log_ratios_of_fifty_stay_finite(name: str, dtype: torch.dtype) -> None:
    logp = torch.tensor([[0.0, -50.0, -0.5], [-50.0, -50.0, -50.0], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-50.0, 0.0, -0.5], [0.0, 0.0, 0.0], [-50.0, -50.0, -50.0]], dtype=dtype)
    mask = torch.ones(3, 3, dtype=torch.bool)
    if name in ("k1", "k2", "k3"):
        loss = losses.kl(logp, old, mask, name).sum()
        loss.backward()
        assert loss.isfinite()
        assert logp.grad.isfinite().all()
        return
    function = partial(losses.ppo_clip, dual_clip=3.0) if name == "dual" else LOSSES[name]
    for advantage in (-1.0, 1.0):
        logp.grad = None
        loss = aggregate(function(logp, old, torch.full((3,), advantage), mask).loss, mask)
        loss.backward()
        assert loss.isfinite()
        assert logp.grad.dtype == dtype
        assert logp.grad.isfinite().all()
        # Never a push the wrong way: raising a probability with a positive advantage never raises the loss.
        assert (logp.grad * advantage <= 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_log_ratios_beyond_the_exponential_stay_finite(name: str) -> None:
    live = torch.tensor([[500.0, -500.0, 500.0]], requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = aggregate(LOSSES[name](live, torch.zeros(1, 3), torch.tensor([-1.0]), mask).loss, mask)
    loss.backward()
    assert loss.isfinite()
    assert live.grad.isfinite().all()
    assert live.grad[0, 0] > 0


def test_kl_pulls_back_from_however_far() -> None:
    for far in (60.0, 200.0):  # the exponential of the second is beyond float32
        logp = torch.tensor([[-far, 0.0]], requires_grad=True)
        loss = losses.kl(logp, torch.tensor([[0.0, -far]]), torch.ones(1, 2, dtype=torch.bool), "k3").sum()
        loss.backward()
        assert loss.isfinite()
        assert -INF < logp.grad[0, 0] < 0 < logp.grad[0, 1]


def test_ratios_are_exact_up_to_the_limit() -> None:
    old = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    logp = torch.tensor([[LOG_RATIO_LIMIT, -80.0]], dtype=torch.float64)
    result = losses.ppo_clip(logp, old, torch.ones(1), torch.ones(1, 2, dtype=torch.bool))
    np.testing.assert_allclose(result.ratio, [[np.exp(20), np.exp(-80)]], rtol=1e-12)


def test_half_precision_is_computed_in_float32() -> None:
    logp, old, advantages, mask = map(torch.tensor, batch((3, 6), 8))
    half, old = logp.bfloat16(), old.bfloat16()
    for loss in LOSSES.values():
        got = loss(half, old, advantages, mask).loss
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, loss(half.float(), old.float(), advantages, mask).loss, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
@STEADY
@given(shape=st.tuples(st.integers(1, 6), st.integers(0, 5)), seed=st.integers(0, 2**16), data=st.data())
def test_micro_batches_add_up_to_the_batch(mode: str, shape: tuple[int, int], seed: int, data: st.DataObject) -> None:
    logp, old, advantages, mask = map(torch.tensor, batch(shape, seed))
    denominator = {"token-mean": mask.sum(), "sequence-mean": shape[0], "constant": 640.0}[mode]
    whole = logp.clone().requires_grad_()
    default = None if mode != "constant" else denominator
    total = aggregate(losses.ppo_clip(whole, old, advantages, mask).loss, mask, mode, default)
    total.backward()

    cuts = sorted(data.draw(st.sets(st.integers(1, shape[0]))) | {0, shape[0]})
    parts, added = logp.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for start, end in pairwise(cuts):
        part = slice(start, end)
        result = losses.ppo_clip(parts[part], old[part], advantages[part], mask[part])
        loss = aggregate(result.loss, mask[part], mode, denominator)
        loss.backward()
        added += loss.detach()
    torch.testing.assert_close(added, total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "denominator", "wanted"),
    [("token-mean", None, 5.0), ("sequence-mean", None, 2.5), ("constant", 20, 0.5)],
)
def test_an_empty_response_counts_as_a_sequence(mode: str, denominator: int | None, wanted: float) -> None:
    loss = torch.tensor([[float("nan"), float("nan"), INF], [4.0, 6.0, INF]])
    mask = torch.tensor([[False, False, False], [True, True, False]])
    assert aggregate(loss, mask, mode, denominator) == wanted
    assert aggregate(loss, mask) == 5.0, "token-mean is the default"


def test_aggregation_names_missing_arguments() -> None:
    loss, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="needs a denominator"):
        aggregate(loss, mask, "constant")
    with pytest.raises(ValueError, match="must be"):
        aggregate(loss, mask, "sum")  # type: ignore[arg-type]


def test_entropy_bonus_rewards_entropy() -> None:
    entropy = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    loss = losses.entropy_bonus(entropy, torch.tensor([[True, False]]))
    loss.sum().backward()
    assert loss.tolist() == [[-1.0, 0.0]]
    assert entropy.grad.tolist() == [[-1.0, 0.0]]


def test_value_loss_takes_the_worse_of_the_clipped_and_the_plain_error() -> None:
    values = torch.tensor([[1.0, -1.0, 0.1, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[2.0, -2.0, -1.0, float("nan")]], requires_grad=True)
    old = torch.zeros(1, 4, requires_grad=True)
    loss = losses.value_clip(values, old, returns, mask)
    np.testing.assert_allclose(loss.detach(), [[0.5 * 1.8**2, 0.5 * 1.8**2, 0.5 * 1.1**2, 0.0]], rtol=1e-6)
    loss.sum().backward()
    np.testing.assert_allclose(values.grad, [[0.0, 0.0, 1.1, 0.0]], rtol=1e-6)
    assert old.grad is returns.grad is None


def test_soft_overlong_penalty_is_a_ramp() -> None:
    lengths = torch.tensor([0, 16_384, 16_385, 18_432, 20_480, 30_000])
    got = dapo.soft_overlong_penalty(lengths, max_length=20_480, cache=4_096)
    np.testing.assert_allclose(got, [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0])
    with pytest.raises(ValueError, match="cache = 0"):
        dapo.soft_overlong_penalty(lengths, max_length=10, cache=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_truncated_samples_has_zero_loss_without_nan(mode: str) -> None:
    mask = dapo.overlong_filter(torch.ones(2, 3, dtype=torch.bool), torch.tensor([True, True]))
    live = torch.zeros(2, 3, requires_grad=True)
    loss = aggregate(losses.ppo_clip(live, live.detach(), torch.ones(2), mask).loss, mask, mode, mask.sum())
    loss.backward()
    assert loss.item() == 0
    assert not live.grad.any()


def test_overlong_filter_drops_truncated_samples_only() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert dapo.overlong_filter(mask, torch.tensor([0, 1])).tolist() == [[True, False], [False, False]]


def test_informative_groups_have_unequal_rewards() -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0], [2.0, 2.0, 2.0]])
    assert dapo.informative_groups(rewards).tolist() == [False, True, False]
    flat, ids = rewards.flatten()[[3, 0, 4, 1, 8]], torch.tensor([5, 2, 5, 2, 9])
    assert dapo.informative_groups(flat, ids).tolist() == [False, True, False]
