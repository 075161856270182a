from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from april.algorithms.logprobs import logprobs_from_logits, token_logprobs
from tests.algorithms.reference import STEADY

N, D, V = 23, 6, 31


def tensors(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=g)


def numpy_logprobs(logits: np.ndarray, targets: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    x = logits / temperature
    log_p = x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
    return log_p[np.arange(len(x)), targets], -(np.exp(log_p) * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_values_match_numpy(temperature: float) -> None:
    hidden, weight, targets = tensors(dtype=torch.float32)
    logits = (hidden.double() @ weight.double().T).detach().numpy()
    wanted = numpy_logprobs(logits, targets.numpy(), temperature)
    for got in (
        token_logprobs(hidden, weight, targets, temperature, chunk_size=4),
        logprobs_from_logits(hidden @ weight.T, targets, temperature),
    ):
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.dtype == torch.float32
            np.testing.assert_allclose(ours.detach(), theirs, atol=1e-5)


@pytest.mark.parametrize("which", ["logp", "entropy", "both"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@STEADY
@given(chunk=st.integers(1, N + 3), seed=st.integers(0, 2**16))
def test_gradients_match_the_whole(which: str, softcap: float | None, chunk: int, seed: int) -> None:
    hidden, weight, targets = tensors(seed, torch.float32)
    g = torch.Generator().manual_seed(seed)
    bias = torch.randn(V, generator=g).requires_grad_()
    temperature = torch.rand(N, generator=g) + 0.5
    sides = torch.randn(2, N, generator=g) * torch.tensor([[which != "entropy"], [which != "logp"]])
    logits = hidden @ weight.T + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    results = []
    for logp, entropy in (
        logprobs_from_logits(logits, targets, temperature),
        token_logprobs(hidden, weight, targets, temperature, chunk, bias, softcap),
    ):
        # A side that is not wanted stays out of the graph altogether, which is a path of its own in the backward pass.
        wanted = [side @ x for side, x in zip(sides, (logp, entropy), strict=True) if side.any()]
        results.append(torch.autograd.grad(sum(wanted), (hidden, weight, bias), retain_graph=True))
    for whole, chunked in zip(*results, strict=True):
        assert whole.abs().sum() > 0
        torch.testing.assert_close(chunked, whole, atol=2e-5, rtol=1e-5)


def test_gradient_matches_finite_differences() -> None:
    hidden, weight, targets = tensors()
    direction = torch.randn(V, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def value(step: float) -> float:
        logits = (hidden @ (weight + step * direction).T).detach().numpy()
        return float(sum(x.sum() for x in numpy_logprobs(logits, targets.numpy(), 1.0)))

    sum(x.sum() for x in token_logprobs(hidden, weight, targets, chunk_size=5)).backward()
    np.testing.assert_allclose((weight.grad * direction).sum(), (value(1e-5) - value(-1e-5)) / 2e-5, rtol=1e-5)


def test_only_inputs_that_require_a_gradient_get_one() -> None:
    hidden, weight, targets = tensors()
    logp, _ = token_logprobs(hidden.detach(), weight, targets)
    logp.sum().backward()
    assert weight.grad is not None
    frozen, _ = token_logprobs(hidden, weight.detach(), targets)
    frozen.sum().backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, targets)[0].requires_grad


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_of_the_whole_batch_are_never_in_memory() -> None:
    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    targets = torch.randint(0, 100, (400,))
    with Largest() as chunked:
        logp, entropy = token_logprobs(hidden, weight, targets, chunk_size=20)
        (logp.sum() + entropy.sum()).backward()
    with Largest() as whole:
        logp, entropy = token_logprobs(hidden, weight, targets)
    assert whole.elements == 400 * 100
    assert chunked.elements == 20 * 100


def test_the_chunk_follows_from_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april.algorithms.logprobs.CHUNK_ELEMENTS", 5 * V)
    hidden, weight, targets = tensors()
    with torch.no_grad(), Largest() as largest:
        token_logprobs(hidden, weight, targets)
    assert largest.elements <= max(5 * V, N * D, V * D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(dtype: torch.dtype) -> None:
    hidden = torch.tensor([[1000.0], [-1000.0], [0.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], dtype=dtype, requires_grad=True)
    logp, entropy = token_logprobs(hidden, weight, torch.tensor([0, 0, 2]), chunk_size=2)
    (logp.sum() + entropy.sum()).backward()
    np.testing.assert_allclose(logp.detach(), [0.0, -2000.0, -np.log(3)], rtol=1e-6)
    np.testing.assert_allclose(entropy.detach(), [0.0, 0.0, np.log(3)], rtol=1e-6, atol=1e-6)
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_bfloat16_weights_collect_their_gradient_in_float32() -> None:
    """Small contributions, one per chunk, would round away in a bfloat16 sum: it would stop at 128."""
    hidden, weight = torch.ones(300, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    logp, _ = token_logprobs(hidden, weight, torch.zeros(300, dtype=torch.long), chunk_size=1)
    logp.sum().backward()
    assert weight.grad.flatten().tolist() == [150.0, -150.0]


def test_autocast_changes_neither_values_nor_gradients() -> None:
    hidden, weight, targets = tensors(dtype=torch.float32)
    plain = token_logprobs(hidden, weight, targets)[0]
    with torch.autocast("cpu", torch.bfloat16):
        cast = token_logprobs(hidden, weight, targets)[0]
    assert torch.equal(plain, cast)
    gradients = [torch.autograd.grad(x.sum(), weight)[0] for x in (plain, cast)]
    assert torch.equal(*gradients)


def test_no_tokens_is_no_log_probabilities() -> None:
    hidden, weight = torch.zeros(0, D, requires_grad=True), torch.zeros(V, D, requires_grad=True)
    logp, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert not weight.grad.any()


def test_misfits_are_named() -> None:
    hidden, weight, targets = tensors()
    with pytest.raises(ValueError, match=r"must be \[N, D\] and \[V, D\]"):
        token_logprobs(hidden, weight.T, targets)
    with pytest.raises(ValueError, match="one token id per row"):
        token_logprobs(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(hidden, weight, targets, temperature=0)
