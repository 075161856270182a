"""What an objective decides; tests/training/test_update.py has its losses against the formulas written out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april.algorithms import ALGORITHMS
from april.algorithms.batch import Batch
from april.algorithms.corrections import CorrectionKind, Diagnostics
from april.algorithms.objective import Objective, UpdateSums, resolve
from tests.algorithms.reference import STEADY
from tests.training.steps import rollout


def test_dppo_takes_the_place_of_the_clip_unless_a_clip_is_set() -> None:
    chosen = resolve("grpo", "dppo", {})
    assert chosen.eps_low == chosen.eps_high == math.inf
    assert resolve("grpo", "dppo", {"eps_high": 0.3}).eps_high == 0.3
    assert resolve("gspo", "dppo", {}).eps_high == 4e-4


def test_settings_of_the_recipe_override_published_ones() -> None:
    assert resolve("ppo", "tis", {"lam": 0.5, "gamma": None}).lam == 0.5
    assert resolve("ppo", "tis", {"lam": None}) == ALGORITHMS["ppo"]


@pytest.mark.parametrize(
    ("name", "correction", "own", "expected"),
    [
        ("gspo", "rollout_logprobs", {}, True),
        ("gspo_token", "opsm", {}, True),
        ("gspo", "geometric", {}, False),
        ("gspo", "rollout_logprobs", {"eps_low": 0.03}, False),
        ("grpo", "rollout_logprobs", {}, False),
    ],
)
def test_a_narrow_clip_range_is_reported_with_older_policies(
    name: str, correction: str, own: dict[str, float], expected: bool
) -> None:
    assert Objective(resolve(name, correction, own), 64, correction).clips_older_policies is expected


def test_an_algorithm_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        resolve("grpoo", "rollout_logprobs", {})


@STEADY
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(0, 1000), st.integers(1, 11))
def test_the_losses_of_micro_batches_add_up_to_that_of_the_update(name: str, seed: int, cut: int) -> None:
    objective = Objective(resolve(name, "rollout_logprobs", {"kl_coefficient": 0.0}), budget=64)
    step = rollout(seed)
    samples = [sample for group in step.groups for sample in group.samples]
    batch = Batch.of(samples, step.version)
    noise = torch.randn(3, *batch.mask.shape, generator=torch.Generator().manual_seed(seed))
    if objective.algorithm.value_head:
        batch = dataclasses.replace(batch, values=noise[0])
    rewards = torch.tensor([[sample.reward for sample in group.samples] for group in step.groups])
    batch = objective.with_advantages(batch, rewards)
    scores = (noise[1] - 3, noise[2].abs())
    denominator = objective.denominator(batch)

    def loss(rows: list[int]) -> torch.Tensor:
        part = batch.rows(rows)
        return objective.loss(part, *(s[rows, : part.mask.shape[1]] for s in scores), denominator).loss

    rows = list(range(len(batch)))
    torch.testing.assert_close(loss(rows[:cut]) + loss(rows[cut:]), loss(rows), atol=1e-5, rtol=1e-5)


def test_sums_add_up() -> None:
    met = Diagnostics(torch.ones(6, 9), torch.ones(9), torch.arange(9.0), torch.ones(3))
    both = UpdateSums(1.0, 2.0, 3.0, 4.0, 5, met) + UpdateSums(1.0, 1.0, 1.0, 1.0, 1)
    assert (both.loss, both.value_loss, both.entropy, both.kl, both.tokens) == (2, 3, 4, 5, 6)
    assert both.diagnostics.metrics() == met.metrics()


def scored(objective: Objective, seed: int) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """A batch with its advantages, and log-probabilities and entropies that gradient can flow to."""
    step = rollout(seed)
    batch = Batch.of([sample for group in step.groups for sample in group.samples], step.version)
    rewards = torch.tensor([[sample.reward for sample in group.samples] for group in step.groups])
    batch = objective.with_advantages(
        dataclasses.replace(batch, reference_logprobs=batch.rollout_logprobs - 0.1), rewards
    )
    noise = torch.randn(2, *batch.mask.shape, generator=torch.Generator().manual_seed(seed))
    return batch, (batch.rollout_logprobs + 0.1 * noise[0]).requires_grad_(), noise[1].abs().requires_grad_()


@pytest.mark.parametrize("correction", ["rollout_logprobs", "dppo", "decoupled"])
def test_tokens_beyond_the_maximum_age_have_no_gradient(correction: CorrectionKind) -> None:
    algorithm = resolve("grpo", correction, {"kl_coefficient": 0.1})
    objective = Objective(algorithm, 64, correction, {"max_age": 1}, entropy_coef=0.1)
    batch, logp, entropy = scored(objective, 1)
    objective.loss(batch, logp, entropy, objective.denominator(batch)).loss.backward()
    old = batch.token_staleness > 1
    for gradient in (logp.grad, entropy.grad):
        assert gradient is not None
        assert not gradient[old].any()
        assert gradient[batch.mask & ~old].any()


def test_dppo_bounds_every_token_relative_to_the_policy_that_sampled_it() -> None:
    """Also tokens that carry no signal: 0.001 (log π_θ/μ)², whose gradient is 0.002 log π_θ/μ."""
    objective = Objective(resolve("dr_grpo", "dppo", {}), 64, "dppo")
    batch, logp, entropy = scored(objective, 2)
    batch = dataclasses.replace(batch, advantages=torch.zeros(len(batch)), reference_logprobs=None)
    assert objective.rows_with_gradient(batch) == batch.mask.any(-1).nonzero()[:, 0].tolist()
    objective.loss(batch, logp, entropy, 1.0).loss.backward()
    expected = 0.002 * (logp.detach() - batch.rollout_logprobs) * batch.mask
    torch.testing.assert_close(logp.grad, expected)
    assert resolve("grpo", "dppo", {}).eps_high == math.inf, "its choice of tokens takes the place of the clip"
