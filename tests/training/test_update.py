"""What an update optimises, against the formulas written out one sample at a time: every term, value and gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from april.algorithms.batch import Batch
from april.algorithms.logprobs import logprobs_from_logits
from april.rollout.batch import RolloutBatch
from april.rollout.sampling import FinishReason, SamplingParams
from april.training.critic import Critic
from april.training.forward import PolicyModel
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from tests import tiny
from tests.algorithms import reference
from tests.training.steps import VERSION, branched, recipe, rollout

BUDGET = 64
UNLIMITED = float("inf")


def scores(model: Any, batch: Batch, row: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p and entropy of a row's trained tokens from the model's own logits, [tokens] each."""
    ids = batch.input_ids[row, : batch.lengths[row]][None]
    log_p = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    mask = batch.mask[row, : batch.lengths[row] - 1]
    return log_p.gather(-1, ids[0, 1:, None])[:, 0][mask], -(log_p.exp() * log_p).sum(-1)[mask]


@dataclasses.dataclass(frozen=True)
class Formula:
    """The objective that some settings of a recipe stand for."""

    ratio: str = "rollout_logprobs"
    low: float = 0.2
    high: float = 0.2
    dual: float = 1e9
    cap: float = UNLIMITED
    window: tuple[float, float] = (0.0, UNLIMITED)
    max_age: int = 99
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    mean: str = "sequence-mean"
    temperature: float = 1.0

    def tokens(self, logp: Tensor, entropy: Tensor, ref: Tensor, batch: Batch, row: int) -> Tensor:
        """The loss of each trained token of a row."""
        mask = batch.mask[row]
        a = batch.advantages[row].expand(mask.shape)[mask]
        prox, mu, age = (x[row][mask] for x in (batch.proximal_logprobs, batch.rollout_logprobs, batch.token_staleness))
        ratio, w = (logp - mu).exp(), torch.ones_like(mu)
        if self.ratio == "prox":
            ratio, w = (logp - prox).exp(), (prox - mu).exp()
        kept = (w >= self.window[0]) & (w <= self.window[1]) & (age <= self.max_age)
        objective = torch.minimum(ratio * a, ratio.clamp(1 - self.low, 1 + self.high) * a)
        objective = torch.where(a < 0, torch.maximum(objective, self.dual * a), objective)
        k1 = logp - ref
        penalty = {"k2": k1**2 / 2, "k3": (-k1).exp() - 1 + k1}[self.kl]
        return -w.clamp(max=self.cap) * kept * objective + self.kl_coef * penalty - self.entropy_coef * entropy

    def loss(self, model: Any, other: Any, batch: Batch) -> Tensor:
        total = torch.zeros(())
        for row in range(len(batch)):
            logp, entropy = scores(model, batch, row, self.temperature)
            ref = scores(other, batch, row, self.temperature)[0].detach()
            terms = self.tokens(logp, entropy, ref, batch, row)
            total = total + (terms.mean() if self.mean == "sequence-mean" else terms.sum())
        divisors = {"sequence-mean": len(batch), "constant": len(batch) * BUDGET, "token-mean": int(batch.mask.sum())}
        return total / divisors[self.mean]


CASES = {
    "clip": ({"eps_low": 0.1, "eps_high": 0.3}, Formula(low=0.1, high=0.3)),
    "dual clip": ({"dual_clip": 1.5}, Formula(dual=1.5)),
    "token mean": ({"loss_aggregation": "token-mean"}, Formula(mean="token-mean")),
    "constant divisor": ({"algorithm": "dr_grpo"}, Formula(mean="constant")),
    "tis": ({"correction": "tis"}, Formula("prox", cap=2.0)),
    "icepop": ({"correction": "icepop"}, Formula("prox", window=(0.5, 5.0))),
    "age": ({"correction": "decoupled", "correction_max_age": 1}, Formula("prox", max_age=1)),
    "k3": ({"kl_coef": 0.5}, Formula(kl="k3", kl_coef=0.5)),
    "k2": (
        {"algorithm": "reinforce_plus_plus_baseline", "kl_coef": 0.5},
        Formula(kl="k2", kl_coef=0.5, mean="token-mean"),
    ),
    "penalty in the reward": (
        {"algorithm": "rloo", "kl_coef": 0.5},
        Formula(low=UNLIMITED, high=UNLIMITED, mean="constant"),
    ),
    "entropy": ({"entropy_coef": 0.3}, Formula(entropy_coef=0.3)),
    "temperature": ({"temperature": 0.5}, Formula(temperature=0.5)),
    "greedy": ({"temperature": 0.0}, Formula()),
}


def learner_and_other(temperature: float = 1.0, **algorithm: object) -> tuple[LocalLearner, Any]:
    """A learner whose reference, if it has one, is another policy."""
    settings = recipe(**algorithm)
    settings.rollout.temperature, settings.training.max_tokens_per_micro_batch = temperature, 150
    learner, other = (
        LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings)),
        tiny.model(seed=1, sharpness=1.0),
    )
    if learner.reference is not None:
        learner.reference.model.load_state_dict(other.state_dict())
    return learner, other


def uneven(seed: int = 1, temperature: float = 1.0) -> RolloutBatch:
    """A rollout one of whose groups has equal rewards."""
    step = rollout(seed, sampling=SamplingParams(max_tokens=64, temperature=temperature))
    for sample in step.groups[1].samples:
        sample.reward = 1.0
    return step


def off_policy(batch: Batch) -> Batch:
    """`batch` with older policies around log π_θ, so that ratios and weights lie on both sides of 1."""
    noise = 0.7 * torch.randn(2, *batch.mask.shape, generator=torch.Generator().manual_seed(0))
    behaviour = (noise[0] - 4.6) * batch.mask
    return dataclasses.replace(batch, rollout_logprobs=behaviour, proximal_logprobs=behaviour + noise[1] * batch.mask)


@pytest.mark.parametrize("case", CASES)
def test_an_update_has_the_loss_and_the_gradient_of_the_formula(case: str) -> None:
    settings, formula = CASES[case]
    learner, other = learner_and_other(**settings)
    batch = off_policy(learner.prepare(uneven(temperature=learner.settings.rollout.temperature)))
    with learner.packed():
        sums = learner.gradient(batch)
    found = [parameter.grad.clone() for parameter in learner.model.parameters()]
    learner.model.zero_grad()
    expected = formula.loss(learner.model, other, batch)
    if case != "greedy":
        assert abs(expected - Formula().loss(learner.model, other, batch)) > 1e-3, "the case tests what it is for"
    expected.backward()
    assert sums.loss == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
    for parameter, gradient in zip(learner.model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_bfloat16_computes_nearly_the_gradient_of_float32(algorithm: str, parameters: torch.dtype) -> None:
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        settings = recipe(algorithm=algorithm, kl_coef=0.1, entropy_coef=0.1)
        settings.model.compute_dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
        wide = parameters if dtype == torch.bfloat16 else torch.float32
        learner = LocalLearner(tiny.model(sharpness=1.0).to(wide), LearnerSettings.of(settings))
        if learner.critic:
            torch.nn.init.constant_(learner.critic.head.weight, 0.1)
        batch = learner.prepare(uneven())
        with learner.packed():
            learner.gradient(batch)
        models = [learner.model, *([learner.critic] if learner.critic else ())]
        assert {parameter.dtype for model in models for parameter in model.parameters()} == {dtype}
        trained = [tensor for model in models for tensor in learner.masters.trained(model)]
        assert {tensor.dtype for tensor in trained} == {tensor.grad.dtype for tensor in trained} == {wide}
        gradients.append(torch.cat([tensor.grad.float().flatten() for tensor in trained]))
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


@torch.no_grad()
def test_the_ratio_of_a_sequence_covers_only_its_kept_tokens() -> None:
    learner, _ = learner_and_other(
        algorithm="gspo", correction="decoupled", correction_max_age=0, eps_low=0.2, eps_high=0.2
    )
    batch, expected = off_policy(learner.prepare(uneven())), 0.0
    for row in range(len(batch)):
        kept = batch.token_staleness[row][batch.mask[row]] == 0
        prox, mu = (x[row][batch.mask[row]][kept] for x in (batch.proximal_logprobs, batch.rollout_logprobs))
        s, a = (scores(learner.model, batch, row)[0][kept] - prox).mean().exp(), batch.advantages[row]
        objective = torch.minimum(s * a, s.clamp(0.8, 1.2) * a) * (prox - mu).exp().sum()
        expected -= float(objective) / len(kept) / len(batch)
    found = learner.objective.loss(batch, *learner.policy(batch), len(batch)).loss
    assert float(found) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def penalties(learner: LocalLearner, other: Any, batch: Batch, coefficient: float) -> np.ndarray:
    """β log π/π_ref of each token, [B, T - 1]."""
    result = torch.zeros(batch.mask.shape)
    for row in range(len(batch)):
        now, before = (scores(model, batch, row)[0] for model in (learner.model, other))
        result[row][batch.mask[row]] = coefficient * (now - before)
    return result.numpy()


def whitened(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, (x - x[mask].mean()) / x[mask].std(ddof=1), 0.0)


def test_ppo_estimates_advantages_from_rewards_less_each_tokens_penalty() -> None:
    learner, other = learner_and_other(algorithm="ppo", kl_coef=0.5, gamma=0.9, gae_lambda=0.8)
    torch.nn.init.normal_(learner.critic.head.weight)
    step = uneven()
    batch = learner.prepare(step)
    mask, values = batch.mask.numpy(), batch.values.numpy()
    assert np.abs(values[mask]).min() > 0
    rewards = -penalties(learner, other, batch, 0.5)
    samples = [sample for group in step.groups for sample in group.samples]
    for row, sample in enumerate(samples):
        rewards[row, reference.trained(mask, row)[-1]] += sample.reward
    advantages, returns = reference.gae(rewards, values, mask, 0.9, 0.8, np.zeros(len(samples)))
    np.testing.assert_allclose(batch.returns, returns, atol=1e-4)
    np.testing.assert_allclose(batch.advantages, whitened(advantages, mask), atol=1e-4)


def test_reinforce_plus_plus_sums_the_future_penalties_of_each_token() -> None:
    learner, other = learner_and_other(algorithm="reinforce_plus_plus", kl_coef=0.5)
    step = uneven()
    batch = learner.prepare(step)
    mask = batch.mask.numpy()
    penalty = penalties(learner, other, batch, 0.5)
    rewards = np.array([[sample.reward] for group in step.groups for sample in group.samples])
    to_go = rewards - penalty[:, ::-1].cumsum(1)[:, ::-1]
    np.testing.assert_allclose(batch.advantages, whitened(to_go, mask), atol=1e-4)


def test_the_critics_loss_is_the_clipped_error_over_all_tokens_of_the_update() -> None:
    learner, _ = learner_and_other(algorithm="ppo", kl_coef=0.0, value_clip=0.05)
    torch.nn.init.normal_(learner.critic.head.weight, std=0.1)
    batch = learner.prepare(uneven())
    before = batch.values + 0.1 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    with learner.packed():
        sums = learner.gradient(dataclasses.replace(batch, values=before))
    v, old, target = (x[batch.mask].numpy() for x in (batch.values, before, batch.returns))
    near = old + np.clip(v - old, -0.05, 0.05)
    expected = 0.5 * np.maximum((v - target) ** 2, (near - target) ** 2).mean()
    assert sums.value_loss == pytest.approx(expected, rel=1e-4)


def test_dapo_omits_truncated_samples_and_penalises_long_ones() -> None:
    settings = recipe(algorithm="dapo")
    settings.rollout.max_response_length = 20
    step, learner = rollout(4), LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
    samples = [sample for group in step.groups for sample in group.samples]
    assert {sample.finish for sample in samples} == {FinishReason.STOP, FinishReason.LENGTH}
    lengths = np.array([sample.length for sample in samples])
    rewards = np.array([sample.reward for sample in samples]) + np.clip((16 - lengths) / 4, -1.0, 0.0)
    assert {0.0, 1.0} < set(np.clip((lengths - 16) / 4, 0.0, 1.0)), "some on the ramp"
    np.testing.assert_allclose(learner.rewards(step.groups).flatten(), rewards)

    batch, plain = learner.prepare(step), Batch.of(samples, step.version)
    for row, sample in enumerate(samples):
        expected = plain.mask[row] & (sample.finish is not FinishReason.LENGTH)
        assert torch.equal(batch.mask[row], expected)
    groups = rewards.reshape(len(step.groups), -1)
    advantages = (groups - groups.mean(1, keepdims=True)) / groups.std(1, ddof=1, keepdims=True)
    np.testing.assert_allclose(batch.advantages, advantages.ravel(), atol=1e-4, err_msg="truncated ones count in these")


def test_metrics_are_means_over_the_tokens_of_each_update() -> None:
    learner, other = learner_and_other(kl_coef=0.1, entropy_coef=0.1)
    learner.settings.training.updates_per_step, learner.settings.training.learning_rate = 2, 1e-30
    step = uneven()
    batch = learner.prepare(step)
    metrics = learner.train(step, 1)
    entropies, divergences, clipped = [], [], []
    with torch.no_grad():
        for row in range(len(batch)):
            logp, entropy = scores(learner.model, batch, row)
            k1 = logp - scores(other, batch, row)[0]
            ratio, a = (logp - batch.rollout_logprobs[row][batch.mask[row]]).exp(), batch.advantages[row]
            entropies.append(entropy)
            divergences.append((-k1).exp() - 1 + k1)
            clipped.append((ratio > 1.2) & (a > 0) | (ratio < 0.8) & (a < 0))

    def mean(rows: list[Tensor]) -> float:
        """Of two updates: the first group, and the others."""
        return float(sum(torch.cat(part).mean() for part in (rows[:4], rows[4:])) / 2)

    assert metrics["entropy"] == pytest.approx(mean(entropies), rel=1e-4)
    assert metrics["kl_reference"] == pytest.approx(mean(divergences), rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(float(torch.cat(clipped).float().mean()))
    assert metrics["clip_fraction"] > 0


def test_the_optimizers_have_the_recipes_settings() -> None:
    settings = recipe(algorithm="ppo")
    training = settings.training
    training.learning_rate, training.critic_learning_rate, training.warmup_steps = 1e-3, 4e-3, 2
    training.betas, training.weight_decay, training.max_grad_norm = (0.8, 0.9), 0.3, 1e-3
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
    learner.release_gradients = lambda: None  # type: ignore[method-assign]
    metrics = learner.train(rollout(1), 1)
    for optimizer, module, norm, lr in (
        (learner.optimizer, learner.model, "grad_norm", 5e-4),
        (learner.critic_optimizer, learner.critic, "value_grad_norm", 2e-3),
    ):
        (group,) = optimizer.param_groups
        assert group["lr"] == pytest.approx(lr)
        assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.3)
        assert metrics[norm] > 1e-2, "before clipping"
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(1e-3, rel=1e-3)


def test_the_critic_of_a_frozen_policy_is_trained() -> None:
    """With adapters the policy's parameters are frozen; its critic is a whole model that learns all the same."""
    critic = Critic(tiny.model(sharpness=1.0).requires_grad_(False))
    assert all(parameter.requires_grad for parameter in critic.parameters())


def test_tokens_are_scored_at_the_temperature_of_their_turn() -> None:
    """Greedy turns at temperature 1; the reference and the canary's whole distribution as well."""
    step = branched(5)
    samples = [sample for group in step.groups for sample in group.samples]
    batch, model = Batch.of(samples, VERSION), tiny.model(sharpness=1.0)
    policy = PolicyModel(model, 0.9)
    with torch.no_grad():
        found, entropy = policy(batch)
        with policy.whole_distribution():
            whole, _ = policy(batch)
    assert batch.temperatures is not None
    seen = set()
    for row, sample in enumerate(samples):
        logits = model(input_ids=batch.input_ids[row : row + 1]).logits[0].detach()
        for turn, transition in enumerate(sample.transitions[:-1]):
            temperature = (transition.request or {}).get("temperature", 1.0) or 1.0  # the recipe's is 1
            start, end = (len(sample.prompt_ids) + place for place in sample.turn_span(turn))
            for scores, at in ((found, temperature), (whole, 1.0)):
                part = logits[start - 1 : end - 1]
                expected, spread = logprobs_from_logits(part, batch.input_ids[row, start:end], at)
                torch.testing.assert_close(scores[row, start - 1 : end - 1], expected, atol=1e-5, rtol=1e-5)
                if scores is found:
                    torch.testing.assert_close(entropy[row, start - 1 : end - 1], spread, atol=1e-5, rtol=1e-5)
            seen.add(temperature)
    assert seen == {0.6, 1.0, 1.7}
