"""Replay of recorded routes in training, against forward passes of one sample at a time."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from april import Group, Prompt, RolloutBatch, Sample, SamplingParams
from april.algorithms.batch import Batch
from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.embedded import EmbeddedEngine
from april.engines.routers import RouterReplay
from april.reporting.metrics_log import read_metrics
from april.rollout.batch import Plan
from april.rollout.state_files import routes_file
from april.rollout.trajectory.routes import RouteRows
from april.training.checkpoint import STATE, DamagedCheckpointError, check_checkpoint, load_state
from april.training.distributed_learner import for_followers
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from tests import tiny
from tests.engines.architectures import perturb
from tests.engines.test_routes import finish, tokens
from tests.forked import run as april
from tests.mixtures import ARCHITECTURES, mixture, routes
from tests.training.steps import recipe


def step(policy: Any, groups: int = 3, size: int = 2) -> RolloutBatch:
    """Groups that the embedded engine has sampled from `policy`, with their routes."""
    made = [
        Group.start(i, Prompt(tuple(range(3 + i, 8 + 3 * i))), size, SamplingParams(max_tokens=9 + 5 * i), 7)
        for i in range(groups)
    ]
    done = [sample for group in made for sample in group.samples]
    asyncio.run(finish(EmbeddedEngine(policy, kv_cache_bytes=1 << 24, router_replay="recorded"), done))
    for number, sample in enumerate(done):
        sample.reward = float(number % 2)
    return RolloutBatch(0, Plan(groups), made)


def learner(policy: Any, replay: str = "recorded", **training: Any) -> LocalLearner:
    made: Recipe = recipe()
    made.training.router_replay = replay  # type: ignore[assignment]
    for name, value in training.items():
        setattr(made.training, name, value)
    return LocalLearner(policy, LearnerSettings.of(made))


def samples_of(step: RolloutBatch) -> list[Sample]:
    return [sample for group in step.groups for sample in group.samples]


@torch.no_grad()
def replayed(policy: Any, sample: Sample) -> torch.Tensor:
    """Log-probabilities of the response, of the sample alone, with its routes."""
    assert sample.routes is not None
    replay, ids = RouterReplay(policy), torch.tensor([tokens(sample)])
    unrouted = np.full((1, *sample.routes.experts.shape[1:]), replay.unknown, np.uint8)
    with replay.installed():
        replay.routes = torch.from_numpy(np.concatenate((sample.routes.experts, unrouted)))
        logits = policy(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]


def scored(subject: LocalLearner, step: RolloutBatch) -> list[torch.Tensor]:
    with subject.packed():
        batch = subject.prepare(step)
        scores = subject._score(subject.logprobs, batch)
    return [row[mask] for row, mask in zip(scores, batch.mask, strict=True)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("packed", [True, False])
def test_scores_are_those_of_each_sample_alone_with_its_routes(architecture: str, packed: bool) -> None:
    policy = mixture(architecture, num_experts_per_tok=3)
    made = step(policy)
    perturb(policy, 1)  # its routers would now choose otherwise
    made.groups[1].samples[0].routes = None
    made.groups[2].samples[1].routes._held[4:9] = 255  # type: ignore[union-attr]
    subject = learner(policy, max_tokens_per_micro_batch=70)
    assert subject.packs
    subject.packs = packed
    found = scored(subject, made)
    for sample, row in zip(samples_of(made), found, strict=True):
        if sample.routes is not None:
            torch.testing.assert_close(row, replayed(policy, sample), atol=2e-5, rtol=0)
    live = scored(learner(copy.deepcopy(policy), "off", max_tokens_per_micro_batch=70), made)
    torch.testing.assert_close(found[2], live[2], atol=2e-5, rtol=0)
    assert max(float((a - b).abs().max()) for a, b in zip(found, live, strict=True)) > 1e-3


def test_the_gradient_is_that_of_any_division_and_of_checkpointed_layers() -> None:
    made, gradients = step(mixture()), []
    settings: Sequence[dict[str, Any]] = (
        {},
        {"max_tokens_per_micro_batch": 70},
        {"max_tokens_per_micro_batch": 70, "gradient_checkpointing": True},
    )
    for training in settings:
        policy = mixture()
        perturb(policy, 1)
        subject = learner(policy, **training)
        with subject.packed():
            subject.gradient(subject.prepare(made))
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    for other in gradients[1:]:
        for name, expected in gradients[0].items():
            torch.testing.assert_close(other[name], expected, atol=1e-5, rtol=1e-3, msg=name)
    assert all(gradients[0][f"model.layers.{i}.mlp.gate.weight"].abs().sum() > 0 for i in range(3))  # type: ignore[union-attr]


def test_a_step_counts_lost_routes_and_leaves_the_model_as_it_was() -> None:
    policy = mixture()
    made, subject = step(policy), learner(policy)
    made.groups[0].samples[0].routes = None
    lost, consumed = len(tokens(made.groups[0].samples[0])) - 1, sum(len(tokens(s)) - 1 for s in samples_of(made))
    assert subject.train(made, 1)["missing_routes"] == pytest.approx(lost / consumed)
    ids = tokens(made.groups[1].samples[0])
    assert not any(module._forward_pre_hooks for module in policy.modules())
    np.testing.assert_array_equal(routes(policy, ids), routes(copy.deepcopy(policy), ids))
    assert "missing_routes" not in learner(mixture(), "off").train(step(mixture()), 1)


def test_the_reference_routes_itself() -> None:
    """Routes are the policy's: a reference of other weights has its own."""
    policy = mixture()
    made, settings = step(policy), recipe(kl_coef=0.1)
    settings.training.router_replay = "recorded"
    perturb(policy, 1)
    subject = LocalLearner(policy, LearnerSettings.of(settings))
    with subject.packed():
        found = subject.prepare(made).reference_logprobs
    plain = learner(copy.deepcopy(policy), "off")
    with plain.packed():
        expected = plain._score(plain.logprobs, Batch.of(samples_of(made), 0))
    assert found is not None
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_routes_are_not_sent_to_all_ranks_with_the_step() -> None:
    made = step(mixture())
    for sample in samples_of(made):
        assert sample.routes is not None
        sample.routes.put(RouteRows(0, np.zeros((100_000, *sample.routes.experts.shape[1:]), np.uint8)))
    sent = pickle.dumps(for_followers(made))
    assert len(sent) < 50_000
    assert [sample.length for sample in samples_of(pickle.loads(sent))] == [s.length for s in samples_of(made)]
    assert all(sample.routes is not None and sample.routes.nbytes >= 500_000 for sample in samples_of(made))


def test_routes_of_another_model_are_refused() -> None:
    policy = mixture()
    made, subject = step(policy), learner(policy)
    sample = samples_of(made)[1]
    own, sample.routes = sample.routes, None
    assert own is not None
    sample.route(RouteRows(0, own.experts[:, :2]), 0, False)
    with pytest.raises(ValueError, match=r"sample 0\.1: Routes\(.*of 2 layers .* the policy has 3 layers with 2 of 8"):
        subject.train(made, 1)
    own.experts[3] = 8
    sample.routes = own
    with pytest.raises(ValueError, match=r"sample 0\.1: expert 8 came, but the policy has 3 layers with 2 of 8"):
        subject.train(made, 1)


def test_settings_that_cannot_replay_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'router_replay = "recorded": Qwen3ForCausalLM has no routers'):
        learner(tiny.model())
    made = recipe()
    made.training.router_replay = "recorded"
    made.engine.engine = "vllm-inproc"
    made.trainer.backend = "megatron"
    with pytest.raises(ConfigError) as error:
        check_recipe(made, loads=False)
    lines = [line for line in str(error.value).splitlines() if "router_replay" in line]
    assert len(lines) == 2
    assert "vllm-inproc" in lines[0]
    assert "megatron" in lines[1]


@pytest.mark.parametrize("setting", ["recorded", "latest"])
def test_a_run_replays_the_routes_of_interrupted_responses_and_resumes(tmp_path: Path, setting: str) -> None:
    added = f'router_replay = "{setting}"\nlearning_rate = 3e-3\nsave_interval = 3\neval_interval = 0\n'
    path = tiny.recipe(tmp_path, rollout="reward_workers = 0\n", training=added)
    tiny.mixture().save_pretrained(tmp_path / "policy")
    done = april("train", path, "--steps", "3")
    assert done.returncode == 0, done.stderr
    done = april("resume", tmp_path / "run", "--steps", "6")
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_metrics(tmp_path / "run") if line["step"]]
    assert [line["missing_routes"] for line in lines] == [0.0] * 6
    assert sum(line["off_policy_token_share"] for line in lines) > 0, "the workload is meant to interrupt something"
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    saved = [s for group in load_state(newest)["rollout"]["state"]["buffer"]["groups"] for s in group["samples"]]
    assert any(sample["routes"].length > 1 for sample in saved if "routes" in sample)
    routes = routes_file(newest / STATE, (newest / STATE).read_text())
    assert routes is not None
    routes.write_bytes(routes.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match=rf"^{routes}: damaged: "):
        check_checkpoint(newest)


def test_adapters_are_trained_with_the_routes_of_the_merged_policy() -> None:
    """Of every linear layer, of the experts and of the routers."""
    made_of = recipe()
    made_of.lora.rank, made_of.training.router_replay, made_of.training.learning_rate = 4, "recorded", 3e-2
    subject = LocalLearner(mixture(), LearnerSettings.of(made_of))
    first = step(subject.served)
    before = scored(subject, first)
    assert subject.train(first, 1)["missing_routes"] == 0
    assert subject.adapters is not None
    trained = [name for name, values in subject.adapters.state_dict().items() if "lora_B" in name and values.any()]
    assert all(any(part in name for name in trained) for part in (".gate.", ".experts.", ".q_proj."))
    after = scored(subject, first)
    assert max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)) > 1e-3, "adapters were trained"
    made = step(subject.served)
    perturbed = samples_of(made)[0].routes
    assert perturbed is not None
    perturbed._held[:6] = (perturbed._held[:6] + 1) % 8
    for sample, row in zip(samples_of(made), scored(subject, made), strict=True):
        torch.testing.assert_close(row, replayed(subject.served, sample), atol=2e-5, rtol=0)
