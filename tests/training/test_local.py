from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from april import FinishReason, Group, Prompt, RolloutBatch, SamplingParams
from april.algorithms import ALGORITHMS
from april.algorithms.catalogue import CORRECTIONS
from april.algorithms.truncation import Truncation
from april.rollout.batch import Plan
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.micro_batches import plan
from tests import tiny
from tests.training.steps import VERSION, recipe, rollout


def naive_loss(model: torch.nn.Module, step: RolloutBatch, advantages: list[float]) -> torch.Tensor:
    """GRPO on the recorded probabilities, one sample at a time, straight from the formula."""
    total = torch.zeros(())
    samples = [s for g in step.groups for s in g.samples]
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        logp = logp[len(sample.prompt_ids) - 1 :]
        terms = []
        for t, sampled in enumerate(sample.loss_mask):
            if sampled:
                ratio = (logp[t] - float(sample.logprobs[t])).exp()
                terms.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        total = total + torch.stack(terms).mean() / len(samples)
    return total


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_tokens", [64, 200, 10_000])
def test_the_batch_has_the_loss_and_the_gradient_of_one_sample_at_a_time(max_tokens: int, packed: bool) -> None:
    step = rollout(0)
    learner = LocalLearner(tiny.model(sharpness=2.0), LearnerSettings.of(recipe()))
    batch = learner.prepare(step)
    advantages = batch.advantages

    rewards = np.array([[s.reward for s in g.samples] for g in step.groups])
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(advantages, expected.ravel(), atol=1e-6)

    naive = naive_loss(learner.model, step, advantages.tolist())
    naive.backward()
    gradients = [p.grad.clone() for p in learner.model.parameters()]
    learner.model.zero_grad()

    denominator = learner.objective.denominator(batch)
    total = 0.0
    with learner.packed() if packed else nullcontext():
        for part in plan(batch.lengths, range(len(batch)), max_tokens, packed):
            micro = batch.rows(part)
            loss = learner.objective.loss(micro, *learner.policy(micro), denominator).loss
            loss.backward()
            total += loss.item()
    assert total == pytest.approx(naive.item(), abs=1e-6)
    for parameter, gradient in zip(learner.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_algorithm_trains_with_every_correction(algorithm: str, correction: str) -> None:
    learner = LocalLearner(
        tiny.model(sharpness=1.0), LearnerSettings.of(recipe(algorithm=algorithm, correction=correction, kl_coef=None))
    )
    metrics = learner.train(rollout(1), 1)
    assert all(math.isfinite(value) for value in metrics.values())
    # Nothing near on-policy here: the narrow window of the geometric mean may drop every sample.
    assert metrics["grad_norm"] > 0 or metrics["masked_fraction"] == 1


def test_the_bounds_of_a_recipe_reach_the_correction() -> None:
    def met(**settings: object) -> dict[str, float]:
        return LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(**settings))).train(rollout(1), 1)

    assert met(correction="tis", correction_cap=math.inf)["capped_fraction"] == 0
    assert met(correction="tis", correction_cap=0.1)["capped_fraction"] > 0
    assert met(correction="icepop", correction_low=0.0, correction_high=math.inf)["masked_fraction"] == 0
    assert met(correction="icepop")["masked_fraction"] > 0
    young = met(correction="rollout_logprobs", correction_max_age=0)
    assert young["by_age/age_0/masked"] == 0
    assert young["by_age/age_1/masked"] == young["by_age/age_2/masked"] == 1


def test_tokens_are_scored_under_the_truncated_distribution() -> None:
    settings = recipe(kl_coef=0.1)
    settings.rollout.temperature, settings.rollout.top_p = 0.7, 0.8
    learner = LocalLearner(tiny.model(), LearnerSettings.of(settings))
    for policy in (learner.policy, learner.reference):
        assert (policy.temperature, policy.truncation) == (0.7, Truncation(top_p=0.8))
    settings.rollout.temperature = 0.0
    greedy = LocalLearner(tiny.model(), LearnerSettings.of(settings)).policy
    assert (greedy.temperature, greedy.truncation) == (1.0, Truncation()), "recorded as those of the whole distribution"


def test_a_penalty_in_the_reward_is_the_sum_over_the_response() -> None:
    """RLOO: R - β Σ log π/π_ref of each sample, less the mean of the group's others (arXiv 2402.14740, equation 7)."""
    step, beta = rollout(1), 0.5
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(algorithm="rloo", kl_coef=beta)))
    other = tiny.model(seed=1, sharpness=1.0)
    learner.reference.model.load_state_dict(other.state_dict())
    advantages = learner.prepare(step).advantages.view(len(step.groups), -1)
    for group, found in zip(step.groups, advantages, strict=True):
        rewards = []
        for sample in group.samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            with torch.no_grad():
                scores = [m(input_ids=ids).logits[0, :-1].log_softmax(-1) for m in (learner.model, other)]
            now, before = (s.gather(-1, ids[0, 1:, None])[len(sample.prompt_ids) - 1 :, 0] for s in scores)
            penalty = float((now - before)[torch.from_numpy(sample.loss_mask)].sum())
            rewards.append(sample.reward - beta * penalty)
        expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_a_penalty_of_zero_is_no_penalty() -> None:
    step = rollout(1)
    penalised, free = (
        LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(algorithm="reinforce_plus_plus", kl_coef=c)))
        for c in (0.1, 0.0)
    )
    # The reference is the policy itself before the first update.
    torch.testing.assert_close(penalised.prepare(step).advantages, free.prepare(step).advantages)
    assert free.reference is None


def test_the_critic_starts_at_zero_and_is_no_part_of_the_policy() -> None:
    step = rollout(1)
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(algorithm="ppo", kl_coef=0.0)))
    batch = learner.prepare(step)
    assert not batch.values.any()
    # λ = 0.95, γ = 1 and values of 0: returns fall by λ per token from the end.
    sample, row = step.groups[0].samples[0], batch.returns[0][batch.mask[0]]
    expected = sample.reward * 0.95 ** torch.arange(len(row) - 1, -1, -1.0)
    torch.testing.assert_close(row, expected)
    policy = {id(p) for p in learner.model.parameters()}
    assert not policy & {id(p) for p in learner.critic.parameters()}


def sampled(learner: LocalLearner, number: int, groups: int = 4, size: int = 8, length: int = 5) -> RolloutBatch:
    """Rollouts that the policy itself samples; a token below 20 is worth a reward."""
    torch.manual_seed(number)
    made = []
    for id in range(groups):
        group = Group.start(id, Prompt((5 + id, 6, 7)), size, SamplingParams(max_tokens=length), number)
        ids = torch.tensor([sample.prompt_ids for sample in group.samples])
        logprobs = torch.zeros(size, 0)
        with torch.no_grad():
            for _ in range(length):
                scores = learner.model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
                drawn = torch.multinomial(scores.exp(), 1)
                ids, logprobs = torch.cat([ids, drawn], 1), torch.cat([logprobs, scores.gather(1, drawn)], 1)
        for sample, tokens, logp in zip(group.samples, ids[:, 3:].tolist(), logprobs.tolist(), strict=True):
            sample.extend(tokens, logp, VERSION, FinishReason.LENGTH)
            sample.reward = sum(token < 20 for token in tokens) / length
        made.append(group)
    return RolloutBatch(VERSION, Plan(len(made)), made)


def mean_reward(step: RolloutBatch) -> float:
    return float(np.mean([sample.reward for group in step.groups for sample in group.samples]))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_policy_learns(algorithm: str) -> None:
    settings = recipe(algorithm=algorithm, kl_coef=0.01)
    settings.training.learning_rate = settings.training.critic_learning_rate = 2e-2
    settings.rollout.max_response_length = 5
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
    assert mean_reward(sampled(learner, 0)) < 0.3
    for number in range(1, 13):
        metrics = learner.train(sampled(learner, number), number)
    assert mean_reward(sampled(learner, 0)) > 0.8
    assert metrics["kl_reference"] > 0


def test_the_critic_learns_the_expected_reward() -> None:
    """Against a policy that stands still, estimates come near the mean reward to go."""
    settings = recipe(algorithm="ppo", kl_coef=0.0, gae_lambda=1.0)
    settings.training.learning_rate, settings.training.critic_learning_rate = 1e-30, 3e-3
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
    first = learner.train(sampled(learner, 1), 1)["value_loss"]
    for number in range(2, 30):
        last = learner.train(sampled(learner, number), number)["value_loss"]
    step = sampled(learner, 99)
    values = learner.prepare(step).values[:, 2]
    assert values.mean().item() == pytest.approx(mean_reward(step), abs=0.1)
    assert last < first


def test_a_restored_learner_continues_like_the_saved_one(tmp_path: Path) -> None:
    settings = recipe(algorithm="ppo", kl_coef=0.1)
    settings.training.updates_per_step = 3
    straight = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
    straight.train(rollout(1), 1)
    straight.save_state(tmp_path)
    policy = tiny.model(sharpness=1.0)
    policy.load_state_dict(straight.model.state_dict())
    restored = LocalLearner(policy, LearnerSettings.of(settings))
    restored.load(tmp_path)
    assert straight.train(rollout(2), 2) == restored.train(rollout(2), 2)
    for a, b in zip(straight.model.parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("groups", "updates"),
    [(6, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]), (7, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12, 13]])],
)
def test_updates_take_whole_groups_once_each(groups: int, updates: list[list[int]]) -> None:
    settings = recipe()
    settings.training.updates_per_step = 3
    learner = LocalLearner(tiny.model(), LearnerSettings.of(settings))
    assert [list(part) for part in learner.updates(rollout(4, groups=groups, size=2).groups)] == updates


@pytest.mark.parametrize("correction", ["none", "decoupled", "tis"])
def test_the_proximal_policy_stays_put_while_updates_move_the_policy(correction: str) -> None:
    """Several updates in one call are single updates in a row that are given the probabilities of the start."""
    settings = recipe(correction=correction)
    settings.training.updates_per_step = 3
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
    step = rollout(4)
    alone = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
    batch = alone.prepare(step)
    start = alone.logprobs(batch).detach()
    trained = batch.advantages != 0
    torch.testing.assert_close(batch.proximal_logprobs[trained], start[trained], atol=1e-5, rtol=1e-5)
    assert not batch.proximal_logprobs[~trained].any(), "what carries no signal is not scored"
    learner.train(step, 1)
    for parameters in alone.optimizer.param_groups:
        parameters["lr"] = settings.training.learning_rate
    moved = []
    with alone.packed():
        batch = alone.prepare(step)
        for rows in alone.updates(step.groups):
            alone.update("an update", batch.rows(rows), [])
            moved.append(float((alone.logprobs(batch).detach() - start).abs().max()))
    assert moved[0] > 1e-3
    for a, b in zip(learner.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_policy_is_trained_without_dropout(checkpointing: bool) -> None:
    """Engines sample without it."""
    updates = []
    for dropout in (0.0, 0.5):
        settings = recipe(algorithm="ppo", kl_coef=0.1)
        settings.training.gradient_checkpointing = checkpointing
        learner = LocalLearner(
            tiny.model(sharpness=1.0, attention_dropout=dropout).train(), LearnerSettings.of(settings)
        )
        learner.packs = False  # packed attention knows no dropout
        updates.append(learner.train(rollout(1), 1))
    assert updates[0] == updates[1]


def test_training_raises_the_probability_of_better_samples() -> None:
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(correction="none")))
    step = rollout(2)
    before = naive_objective(learner, step)
    for number in range(1, 6):
        learner.train(step, number)
    assert naive_objective(learner, step) > before


@torch.no_grad()
def naive_objective(learner: LocalLearner, step: RolloutBatch) -> float:
    total = 0.0
    samples = [s for g in step.groups for s in g.samples]
    for sample, advantage in zip(samples, learner.prepare(step).advantages.tolist(), strict=True):
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logp = learner.model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total += advantage * float(logp[len(sample.prompt_ids) - 1 :].mean())
    return total


def test_groups_of_equal_rewards_do_not_change_the_policy() -> None:
    step = rollout(3)
    for group in step.groups:
        for sample in group.samples:
            sample.reward = 1.0
    learner = LocalLearner(tiny.model(), LearnerSettings.of(recipe()))
    before = [p.clone() for p in learner.model.parameters()]
    metrics = learner.train(step, 1)
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_a_kl_penalty_holds_the_policy_near_the_reference() -> None:
    free, held = (
        LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(kl_coef=c, correction="none")))
        for c in (0.0, 50.0)
    )
    start = [p.clone() for p in free.model.parameters()]
    step = rollout(5)
    for number in range(1, 8):
        free.train(step, number)
        held.train(step, number)

    def distance(learner: LocalLearner) -> float:
        return sum(float((a - b).detach().abs().sum()) for a, b in zip(learner.model.parameters(), start, strict=True))

    assert distance(held) < distance(free)
