from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from april.algorithms.corrections import Correction, CorrectionKind, Diagnostics, correct, diagnostics
from april.algorithms.losses import LOSSES, aggregate, ppo_clip
from tests.algorithms.reference import STEADY, trained

KINDS = get_args(CorrectionKind)
WEIGHTED = ["decoupled", "tis", "icepop", "sequence", "geometric"]


def batch(shape: tuple[int, int], seed: int, spread: float = 0.6) -> tuple[Tensor, ...]:
    """logp, prox, behaviour, mask and ages, of tokens that grow older towards the front as in a partial rollout."""
    rng = np.random.default_rng(seed)
    behaviour = -rng.random(shape) * 3 - 0.01
    prox = behaviour + rng.normal(size=shape) * spread
    logp = prox + rng.normal(size=shape) * 0.1
    ages = np.sort(rng.integers(0, 4, shape), axis=1)[:, ::-1].copy()
    return tuple(map(torch.tensor, (logp, prox, behaviour, rng.random(shape) < 0.7, ages)))


def advantages_of(mask: Tensor) -> Tensor:
    """One per sequence, of either sign and 0."""
    return torch.linspace(-1, 2, len(mask), dtype=torch.float64)


def expected(kind: str, logp: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor) -> np.ndarray:
    """The weights with the published bounds, sample by sample; 0 for dropped tokens."""
    log_w, result, a = (prox - behaviour).numpy(), np.zeros(mask.shape), advantages_of(mask).numpy()
    new, old = logp.numpy(), behaviour.numpy()
    for i in range(len(mask)):
        tokens = trained(mask.numpy(), i)
        product = np.exp(sum(log_w[i, t] for t in tokens))
        for t in tokens:
            w = np.exp(log_w[i, t])
            mean = product ** (1 / len(tokens))
            change = np.exp(new[i, t]) - np.exp(old[i, t])
            fallen = sum(old[i, u] - new[i, u] for u in tokens) / len(tokens)
            result[i, t] = {
                "none": 1.0,
                "rollout_logprobs": 1.0,
                "decoupled": w,
                "tis": min(w, 2.0),
                "icepop": w if 0.5 <= w <= 5.0 else 0.0,
                "sequence": min(product, 2.0),
                "geometric": mean if 0.99 <= mean <= 1.01 else 0.0,
                "dppo": 0.0 if (a[i] > 0 and change > 0.2) or (a[i] < 0 and change < -0.2) else 1.0,
                "opsm": 0.0 if a[i] < 0 and fallen > 1e-4 else 1.0,
            }[kind]
    return result


def corrected_loss(kind: str, logp: Tensor, c: Correction, mask: Tensor, loss: str = "ppo_clip") -> Tensor:
    return aggregate(LOSSES[loss](logp, c.old_logprobs, advantages_of(mask), c.mask).loss * c.weights, mask)


@pytest.mark.parametrize("kind", KINDS)
@STEADY
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(0, 6)),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.01, 0.2, 1.5]),
)
def test_weights_and_denominator_match_the_papers(kind: str, shape: tuple[int, int], seed: int, spread: float) -> None:
    logp, prox, behaviour, mask, ages = batch(shape, seed, spread)
    c = correct(kind, logp, prox, behaviour, mask, ages, advantages_of(mask))
    wanted = expected(kind, logp, prox, behaviour, mask)
    np.testing.assert_allclose(c.weights, wanted, atol=1e-9, rtol=1e-9)
    assert torch.equal(c.mask, torch.tensor(wanted > 0))
    torch.testing.assert_close(c.old_logprobs, behaviour if kind in ("rollout_logprobs", "dppo", "opsm") else prox)


@pytest.mark.parametrize("kind", KINDS)
@STEADY
@given(shape=st.tuples(st.integers(1, 4), st.integers(0, 6)), seed=st.integers(0, 2**16))
def test_on_policy_every_correction_is_the_identity(kind: str, shape: tuple[int, int], seed: int) -> None:
    logp, _, _, mask, ages = batch(shape, seed)
    c = correct(kind, logp, logp, logp, mask, ages, advantages_of(mask))
    assert torch.equal(c.weights, mask.double())
    assert torch.equal(c.mask, mask)
    assert torch.equal(c.old_logprobs, logp)
    assert not c.capped.any()


@pytest.mark.parametrize("loss", LOSSES)
@STEADY
@given(shape=st.tuples(st.integers(1, 4), st.integers(0, 6)), seed=st.integers(0, 2**16))
def test_with_one_version_all_forms_agree(loss: str, shape: tuple[int, int], seed: int) -> None:
    _, prox, _, mask, _ = batch(shape, seed, spread=0.002)
    moved = prox + 0.15 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tanh()
    results = []
    fresh = torch.zeros(shape)
    for kind in KINDS:
        live = moved.clone().requires_grad_()
        wide = {"delta": 0.2} if kind == "opsm" else {}
        c = correct(kind, live, prox, prox, mask, fresh, advantages_of(mask), **wide)
        value = corrected_loss(kind, live, c, mask, loss)
        value.backward()
        results.append((value.detach(), live.grad))
    for value, gradient in results[1:]:
        assert torch.equal(value, results[0][0])
        assert torch.equal(gradient, results[0][1])


def test_corrections_differ_off_policy() -> None:
    logp, prox, behaviour, mask, ages = batch((4, 12), 2)
    known = logp, prox, behaviour, mask, ages, advantages_of(mask)
    values = {corrected_loss(kind, logp, correct(kind, *known), mask).item() for kind in KINDS}
    assert len(values) == len(KINDS)


def test_decoupled_loss_is_areals_objective() -> None:
    logp, prox, behaviour, mask, _ = batch((3, 5), 4)
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    c = correct("decoupled", logp, prox, behaviour, mask)
    got = ppo_clip(logp, c.old_logprobs, advantages, c.mask).loss * c.weights
    w, r, a = (prox - behaviour).exp().numpy(), (logp - prox).exp().numpy(), advantages[:, None].numpy()
    wanted = -w * np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
    np.testing.assert_allclose(got, np.where(mask, wanted, 0.0), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_carry_no_gradient(kind: str) -> None:
    logp, prox, behaviour, mask, ages = batch((3, 5), 5)
    tensors = [x.clone().requires_grad_() for x in (logp, prox, behaviour)]
    c = correct(kind, *tensors, mask, ages, advantages_of(mask))
    assert not c.weights.requires_grad
    assert not c.old_logprobs.requires_grad
    assert not diagnostics(c, *tensors[1:], mask).sums.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_beyond_the_age_carry_no_gradient(kind: str) -> None:
    logp, prox, behaviour, mask, ages = batch((4, 8), 6, spread=0.01)
    live = logp.clone().requires_grad_()
    c = correct(kind, live, prox, behaviour, mask, ages, advantages_of(mask), max_age=1)
    for loss in LOSSES:
        live.grad = None
        corrected_loss(kind, live, c, mask, loss).backward()
        assert not live.grad[ages > 1].any()
        assert live.grad[c.mask].any()
    free = correct(kind, logp, prox, behaviour, mask, ages, advantages_of(mask)).mask
    assert torch.equal(c.mask, free & (ages <= 1))


def test_a_correction_requires_its_inputs() -> None:
    logp, prox, behaviour, mask, ages = batch((2, 2), 0)
    with pytest.raises(ValueError, match="needs token_staleness"):
        correct("none", logp, prox, behaviour, mask, max_age=1)
    for kind in ("dppo", "opsm"):
        with pytest.raises(ValueError, match="needs the advantages"):
            correct(kind, logp, prox, behaviour, mask, ages)


def test_bounds_can_be_set_and_lifted() -> None:
    prox, zero, mask = torch.tensor([[0.1, 3.0, -3.0]]), torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    free = correct("tis", prox, prox, zero, mask, cap=float("inf"))
    torch.testing.assert_close(free.weights, prox.exp())
    capped = correct("decoupled", prox, prox, zero, mask, cap=1.5)
    torch.testing.assert_close(capped.weights, prox.exp().clamp(max=1.5))
    assert capped.capped.tolist() == [[False, True, False]]
    areal = correct("decoupled", prox, prox, zero, mask, high=5.0)
    assert areal.mask.tolist() == [[True, False, True]]


@pytest.mark.parametrize("kind", WEIGHTED)
def test_a_weight_on_its_bound_is_within_it(kind: str) -> None:
    """On-policy the correction is the identity even where every bound is 1."""
    logp, _, _, mask, _ = batch((3, 5), 10)
    c = correct(kind, logp, logp, logp, mask, cap=1.0, low=1.0, high=1.0)
    assert torch.equal(c.mask, mask)
    assert torch.equal(c.weights, mask.double())
    assert not c.capped.any()


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("none", "cap"),
        ("rollout_logprobs", "low"),
        ("opsm", "high"),
        ("tis", "delta"),
        ("decoupled", "delta"),
        ("dppo", "cap"),
    ],
)
def test_a_bound_that_does_not_apply_is_refused(kind: str, bound: str) -> None:
    logp, prox, behaviour, mask, _ = batch((2, 2), 0)
    with pytest.raises(ValueError, match=f'"{kind}" has no {bound}'):
        correct(kind, logp, prox, behaviour, mask, **{bound: 2.0})


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    logp, prox, behaviour, mask, _ = batch((2, 2), 0)
    with pytest.raises(ValueError, match="'ris': must be one of none, rollout_logprobs, decoupled, tis"):
        correct("ris", logp, prox, behaviour, mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_ratios_of_fifty_stay_finite(kind: str, dtype: torch.dtype) -> None:
    prox = torch.tensor([[0.0, -50.0, -1.0], [0.0, 0.0, 0.0]], dtype=dtype)
    behaviour = torch.tensor([[-50.0, 0.0, -1.0], [-50.0, -50.0, -50.0]], dtype=dtype)
    mask = torch.ones(2, 3, dtype=torch.bool)
    live = prox.clone().requires_grad_()
    c = correct(kind, live, prox, behaviour, mask, mask.long(), advantages_of(mask))
    loss = corrected_loss(kind, live, c, mask)
    loss.backward()
    assert c.weights.isfinite().all()
    assert loss.isfinite()
    assert live.grad.isfinite().all()
    metrics = diagnostics(c, prox, behaviour, mask).metrics()
    assert all(np.isfinite(list(metrics.values())))


def test_the_product_over_a_long_response_stays_finite_without_a_cap() -> None:
    prox, mask = torch.zeros(1, 1000), torch.ones(1, 1000, dtype=torch.bool)
    for behaviour in (prox - 1.0, prox + 1.0):
        weights = correct("sequence", prox, prox, behaviour, mask, cap=float("inf")).weights
        assert weights.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_zero_and_not_nan(kind: str) -> None:
    live = torch.full((2, 3), float("nan"), requires_grad=True)
    nan, mask = torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool)
    c = correct(kind, live, nan, nan, mask, mask.long(), advantages_of(mask))
    loss = corrected_loss(kind, live, c, mask)
    loss.backward()
    assert loss.item() == 0
    assert not live.grad.any()
    metrics = diagnostics(c, nan, nan, mask).metrics()
    assert metrics.pop("ess") == 1
    assert set(metrics.values()) == {0.0}


def test_a_correction_that_drops_everything_leaves_zero() -> None:
    logp, prox, behaviour, mask, ages = batch((3, 4), 7)
    live = logp.clone().requires_grad_()
    loss = corrected_loss("none", live, correct("none", live, prox, behaviour, mask, ages + 9, max_age=3), mask)
    loss.backward()
    assert loss.item() == 0
    assert not live.grad.any()


def test_diagnostics_by_age_equal_a_numpy_reference() -> None:
    logp, prox, behaviour, mask, ages = batch((6, 10), 8, spread=1.0)
    c = correct("icepop", logp, prox, behaviour, mask, ages, cap=2.0, max_age=2)
    clipped = ppo_clip(logp, c.old_logprobs, torch.ones(6), c.mask, eps_low=0.05, eps_high=0.05).clipped
    metrics = diagnostics(c, prox, behaviour, mask, ages, clipped).metrics()
    log_w = (prox - behaviour).numpy()
    for prefix, chosen in [("", mask), *((f"age_{age}/", mask & (ages == age)) for age in range(4))]:
        tokens = chosen.numpy()
        w = np.exp(log_w[tokens])
        wanted = {
            "tokens": tokens.sum(),
            "clipped": clipped.numpy()[tokens].mean(),
            "masked": (~c.mask).numpy()[tokens].mean(),
            "capped": (c.weights == 2.0).numpy()[tokens].mean(),
            "w_mean": w.mean(),
            "w_max": w.max(),
            "kl": -log_w[tokens].mean(),
            "kl_k3": (w - 1 - np.log(w)).mean(),
        }
        for name, value in wanted.items():
            np.testing.assert_allclose(metrics[prefix + name], value, rtol=1e-9, err_msg=prefix + name)
    assert metrics["clipped"] > 0
    assert metrics["capped"] > 0
    assert metrics["age_3/masked"] == 1.0


def test_diagnostics_of_micro_batches_add_up() -> None:
    logp, prox, behaviour, mask, ages = batch((6, 10), 9)
    c = correct("tis", logp, prox, behaviour, mask, ages)
    whole = diagnostics(c, prox, behaviour, mask, ages).metrics()

    def part(rows: slice) -> object:
        share = Correction(*(x[rows] for x in c))
        return diagnostics(share, prox[rows], behaviour[rows], mask[rows], ages[rows])

    parts = (part(slice(0, 1)) + part(slice(1, 6))).metrics()
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-9)


def test_old_ages_are_reported_together() -> None:
    ages, mask, zero = torch.tensor([[0, 2, 3, 7]]), torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4)
    metrics = diagnostics(correct("none", zero, zero, zero, mask), zero, zero, mask, ages, oldest=3).metrics()
    tokens = {name: value for name, value in metrics.items() if name.endswith("tokens")}
    assert tokens == {"tokens": 4, "age_0/tokens": 1, "age_2/tokens": 1, "age_3+/tokens": 2}


def test_the_effective_sample_size_equals_a_numpy_reference_for_any_micro_batches() -> None:
    logp, prox, behaviour, mask, _ = batch((6, 10), 9)
    mask[2] = False
    ratios = np.array(
        [min(np.exp(sum((logp - behaviour)[i, t] for t in trained(mask.numpy(), i))), 8.0) for i in (0, 1, 3, 4, 5)]
    )
    whole = diagnostics(correct("none", logp, prox, behaviour, mask), prox, behaviour, mask, logp=logp)
    expected = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    assert whole.effective_sample_size == pytest.approx(expected)
    parts = Diagnostics.none()
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = [x[rows] for x in (logp, prox, behaviour, mask)]
        parts = parts + diagnostics(correct("none", *part), *part[1:], logp=part[0])
    assert parts.effective_sample_size == pytest.approx(expected)
    assert diagnostics(correct("none", prox, prox, prox, mask), prox, prox, mask).effective_sample_size == 1
