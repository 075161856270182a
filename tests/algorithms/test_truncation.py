"""A fresh token's ratio is 1 under truncated sampling, too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april import Sample, SamplingParams
from april.algorithms.batch import Batch
from april.algorithms.logprobs import logprobs_from_logits, token_logprobs
from april.algorithms.truncation import Truncation
from april.engines.embedded.sampling import draw
from april.training.forward import PolicyModel
from tests.algorithms.reference import STEADY
from tests.engines.test_embedded import POLICY, engine, run

RULES = st.builds(
    Truncation, st.integers(0, 12), st.sampled_from([1.0, 0.9, 0.5, 1e-6]), st.sampled_from([0.0, 0.01, 0.3, 0.9])
)


@STEADY
@given(RULES, st.integers(0, 1000), st.sampled_from([0.7, 1.0, 1.5]))
def test_the_kept_tokens_are_those_of_the_embedded_engine(rule: Truncation, seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(20, 30, generator=generator)
    params = SamplingParams(temperature=temperature, top_k=rule.top_k, top_p=rule.top_p, min_p=rule.min_p)
    drawn, recorded, _ = draw(logits.clone(), params, torch.rand(20, generator=generator, dtype=torch.float64))
    left = rule.apply(logits / temperature, drawn.long())
    scored, _ = logprobs_from_logits(left, drawn.long())
    torch.testing.assert_close(scored, recorded.float(), atol=1e-5, rtol=1e-5)


@STEADY
@given(RULES, st.integers(0, 1000), st.integers(1, 7))
def test_gradients_belong_to_the_truncated_distribution(rule: Truncation, seed: int, chunk: int) -> None:
    """Also at tokens that the rule has come to cut off, which are left because they were drawn."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(6, 5, generator=generator), torch.randn(30, 5, generator=generator)
    targets = torch.randint(30, (6,), generator=generator)
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            logp, entropy = token_logprobs(h, w, targets, 0.8, chunk, truncation=rule)
        else:
            logits = h @ w.T / 0.8
            left = rule.apply(logits.detach(), targets) > logits.detach().amax(-1, keepdim=True) - 1e3
            logp, entropy = logprobs_from_logits(logits.masked_fill(~left, -1e4), targets)
        (logp.sum() + entropy.square().sum()).backward()
        results.append((logp.detach(), entropy.detach(), h.grad, w.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("setting", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"temperature": 0.7, "top_p": 0.5}])
async def test_scores_of_fresh_tokens_equal_the_recorded_ones(setting: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=30, **setting)  # type: ignore[arg-type]
    drawn = [Sample(0, i, (1, 2, 3), params, seed=i) for i in range(6)]
    await run(engine(), drawn)
    batch = Batch.of(drawn, version=0)
    rule = Truncation(params.top_k, params.top_p, params.min_p)
    with torch.no_grad():
        scored, _ = PolicyModel(POLICY, params.temperature, rule)(batch)
        whole, _ = PolicyModel(POLICY, params.temperature)(batch)
    assert (scored - batch.rollout_logprobs)[batch.mask].abs().max() < 1e-3
    assert (whole - batch.rollout_logprobs)[batch.mask].mean() < -0.05, "without it they would look stale"


def test_no_token_is_removed_without_a_rule() -> None:
    assert not Truncation()
    assert Truncation(top_k=3)
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    assert torch.equal(Truncation().apply(logits, torch.tensor([0]))[:, :2], logits[:, :2])
