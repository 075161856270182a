from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from april import ENVIRONMENT, FinishReason, Group, Prompt, Sample, SamplingParams, Segment, Step
from april.config import AlgorithmSettings, Recipe
from april.training.batch import micro_batches
from april.training.learner import Learner, TrainingError, resolve_algorithm
from tests import tiny

VERSION = 3


def rollout(seed: int, groups: int = 3, size: int = 4, longest: int = 40) -> Step:
    """Groups as a scheduler would hand them over at version 3: mixed versions, a truncated sample, an empty turn."""
    rng = np.random.default_rng(seed)
    made = []
    for id in range(groups):
        prompt = Prompt(tuple(rng.integers(4, 100, rng.integers(1, 12)).tolist()), f"prompt {id}")
        group = Group.start(id, prompt, size, SamplingParams(max_tokens=64), seed)
        for sample in group.samples:
            for version in range(int(rng.integers(0, VERSION + 1)), VERSION + 1):
                n = int(rng.integers(1, longest // 4))
                logprobs = rng.uniform(-5, -0.1, n).tolist()
                sample.segments.append(Segment(version, rng.integers(4, 100, n).tolist(), logprobs))
                sample.length += n
                if rng.random() < 0.3:  # a turn of an environment, which no policy sampled
                    sample.segments.append(Segment(ENVIRONMENT, rng.integers(4, 100, 3).tolist(), [0.0] * 3))
                    sample.length += 3
            sample.finish = FinishReason.STOP if rng.random() < 0.8 else FinishReason.LENGTH
            sample.reward = float(rng.integers(0, 3))
        made.append(group)
    return Step(VERSION, made)


def recipe(**algorithm: object) -> Recipe:
    made = Recipe(algorithm=AlgorithmSettings(**{"kl_coef": 0.0, **algorithm}))  # type: ignore[arg-type]
    made.rollout.max_response_length = 64
    made.training.learning_rate = 1e-3
    return made


def naive_loss(model: torch.nn.Module, step: Step, advantages: list[float]) -> torch.Tensor:
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


@pytest.mark.parametrize("max_tokens", [64, 200, 10_000])
def test_the_packed_batch_has_the_loss_and_the_gradient_of_one_sample_at_a_time(max_tokens: int) -> None:
    step = rollout(0)
    learner = Learner(tiny.model(sharpness=2.0), recipe())
    samples = [s for g in step.groups for s in g.samples]
    advantages = learner.advantages(step.groups)

    rewards = np.array([[s.reward for s in g.samples] for g in step.groups])
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(advantages, expected.ravel(), atol=1e-6)

    naive = naive_loss(learner.model, step, advantages.tolist())
    naive.backward()
    gradients = [p.grad.clone() for p in learner.model.parameters()]
    learner.model.zero_grad()

    denominator = learner.denominator(samples)
    packed = 0.0
    for batch in micro_batches(samples, advantages, VERSION, max_tokens):
        loss, _, _ = learner.loss(batch, samples, denominator)
        loss.backward()
        packed += loss.item()
    assert packed == pytest.approx(naive.item(), abs=1e-6)
    for parameter, gradient in zip(learner.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


@given(st.integers(0, 10_000), st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_micro_batches_partition_the_samples_within_the_budget(seed: int, max_tokens: int) -> None:
    step = rollout(seed)
    samples = [s for g in step.groups for s in g.samples]
    advantages = torch.arange(float(len(samples)))
    batches = list(micro_batches(samples, advantages, VERSION, max_tokens))
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(samples)))
    for batch in batches:
        rows, width = batch.input_ids.shape
        assert rows == 1 or rows * width <= max_tokens
        for row, index in enumerate(batch.indices):
            check_row(samples[index], batch, row)
            assert batch.advantages[row] == index


def check_row(sample: Sample, batch, row: int) -> None:  # type: ignore[no-untyped-def]
    """Ids, log-probabilities and ages are those that were sampled, each where it belongs."""
    whole = [*sample.prompt_ids, *sample.response_ids]
    assert batch.input_ids[row, : len(whole)].tolist() == whole
    start = len(sample.prompt_ids) - 1
    where = slice(start, start + sample.length)
    assert batch.mask[row, where].tolist() == sample.loss_mask.tolist()
    assert int(batch.mask[row].sum()) == int(sample.loss_mask.sum())
    mask = batch.mask[row, where]
    torch.testing.assert_close(batch.behaviour[row, where][mask], torch.from_numpy(sample.logprobs)[mask])
    assert (VERSION - batch.ages[row, where][mask]).tolist() == sample.versions[sample.loss_mask].tolist()


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo"])
@pytest.mark.parametrize("correction", ["none", "behaviour", "decoupled", "tis", "icepop"])
def test_every_algorithm_trains_with_every_correction(algorithm: str, correction: str) -> None:
    learner = Learner(tiny.model(sharpness=1.0), recipe(algorithm=algorithm, correction=correction))
    metrics = learner.train(rollout(1), 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0


def test_training_makes_better_samples_likelier() -> None:
    learner = Learner(tiny.model(sharpness=1.0), recipe(correction="none"))
    step = rollout(2)
    before = naive_objective(learner, step)
    for number in range(1, 6):
        learner.train(step, number)
    assert naive_objective(learner, step) > before


@torch.no_grad()
def naive_objective(learner: Learner, step: Step) -> float:
    total = 0.0
    samples = [s for g in step.groups for s in g.samples]
    for sample, advantage in zip(samples, learner.advantages(step.groups).tolist(), strict=True):
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logp = learner.model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total += advantage * float(logp[len(sample.prompt_ids) - 1 :].mean())
    return total


def test_groups_of_equal_rewards_leave_the_policy_alone() -> None:
    step = rollout(3)
    for group in step.groups:
        for sample in group.samples:
            sample.reward = 1.0
    learner = Learner(tiny.model(), recipe())
    before = [p.clone() for p in learner.model.parameters()]
    metrics = learner.train(step, 1)
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_several_updates_a_step_take_whole_groups_and_keep_the_proximal_policy() -> None:
    settings = recipe(correction="decoupled")
    settings.training.updates_per_step = 3
    learner = Learner(tiny.model(sharpness=1.0), settings)
    metrics = learner.train(rollout(4), 1)
    assert math.isfinite(metrics["loss"])
    first = Learner(tiny.model(sharpness=1.0), settings)
    samples = [s for g in rollout(4).groups for s in g.samples]
    before = first._logprobs_before(samples, first.advantages(rollout(4).groups), VERSION)
    assert set(before) == {i for i, a in enumerate(first.advantages(rollout(4).groups)) if a != 0}


def test_a_kl_penalty_holds_the_policy_near_the_reference() -> None:
    free, held = (Learner(tiny.model(sharpness=1.0), recipe(kl_coef=c, correction="none")) for c in (0.0, 50.0))
    start = [p.clone() for p in free.model.parameters()]
    step = rollout(5)
    for number in range(1, 8):
        free.train(step, number)
        held.train(step, number)

    def distance(learner: Learner) -> float:
        return sum(float((a - b).detach().abs().sum()) for a, b in zip(learner.model.parameters(), start, strict=True))

    assert distance(held) < distance(free)


def test_a_gradient_that_is_not_finite_stops_training_and_leaves_the_policy_alone() -> None:
    learner = Learner(tiny.model(), recipe())
    step = rollout(6)
    step.groups[0].samples[0].reward = float("nan")
    before = [p.clone() for p in learner.model.parameters()]
    with pytest.raises(TrainingError, match="norm is nan"):
        learner.train(step, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = recipe()
    settings.training.steps, settings.training.warmup_steps = 12, 2
    settings.training.learning_rate = 1.0
    learner = Learner(tiny.model(), settings)
    assert [learner.learning_rate(n) for n in (1, 2, 3, 12)] == [0.5, 1, 1, 1]
    settings.training.lr_schedule = "linear"
    assert [learner.learning_rate(n) for n in (2, 3, 8)] == [1, 1, 0.5]
    settings.training.lr_schedule = "cosine"
    assert learner.learning_rate(8) == pytest.approx(0.5)


@pytest.mark.parametrize(("name", "message"), [("grpoo", "did you mean 'grpo'"), ("ppo", "value head")])
def test_algorithms_that_cannot_be_had_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_algorithm(AlgorithmSettings(algorithm=name))
