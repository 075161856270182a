"""Two updates of an algorithm on several ranks, against the same updates in one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from april.config.recipe import Recipe
from april.rollout.batch import RolloutBatch
from april.rollout.trajectory.routes import Routes
from april.training.canary import canary_tokens
from april.training.distributed_learner import for_followers
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner, whole
from tests import tiny
from tests.training.steps import branched, recipe, rollout

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"algorithm": "dapo"},
    "gspo": {"algorithm": "gspo"},
    "ppo": {"algorithm": "ppo"},
    "dppo": {"correction": "dppo"},
    "reference": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "penalty": {"algorithm": "reinforce_plus_plus", "kl_coef": 0.1},
    "lora": {"kl_coef": 0.1},
}
UPDATES = {"dppo": 3}


def settings(case: str) -> Recipe:
    chosen = recipe(**CASES[case])
    chosen.training.max_tokens_per_micro_batch = 200
    chosen.training.learning_rate = 5e-5  # Adam may make a step of this size of the rounding of a gradient near 0
    chosen.training.updates_per_step = UPDATES.get(case, 1)
    chosen.lora.rank = 4 if case == "lora" else 0
    return chosen


def compare(
    ranks: Ranks,
    cases: list[str],
    policy: str = "model",
    heads: int = 2,
    checkpointing: bool = False,
    parameters: float = 1e-6,
    branches: bool = False,
    **trainer: Any,
) -> None:
    """Metrics to 1e-4, gradients of the first update to 1e-5, of the second to 1e-4, and parameters to 1e-6.

    Args:
        policy: name of a policy of `tiny`.
        heads: its key-value heads.
        parameters: tolerance of the parameters; divided layers round differently, which Adam amplifies.
        branches: train on episodes of a varying number of sequences.
        checkpointing: whether the ranks recompute activations.
        trainer: settings of the section of that name.
    """
    steps = branched if branches else rollout
    for case in cases:
        chosen = settings(case)
        chosen.training.gradient_checkpointing = checkpointing
        for name, value in trainer.items():
            setattr(chosen.trainer, name, value)
        make = getattr(tiny, policy)
        shape = {"sharpness": 1.0, "num_key_value_heads": heads}
        sharded = ShardedLearner(make(**shape), LearnerSettings.of(chosen), ranks)
        alone = LocalLearner(make(**shape), LearnerSettings.of(settings(case)))
        for learner in (sharded, alone):
            learner.release_gradients = lambda: None  # type: ignore[method-assign]
        for number in (1, 2):
            found, expected = (learner.train(steps(number), number) for learner in (sharded, alone))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                # Each side samples its own elements to see which of them an update changes.
                tolerance = 1e-2 if name == "updated_share" else 1e-4
                close = math.isclose(found[name], value, rel_tol=tolerance, abs_tol=1e-5)
                assert close, (case, name, found[name], value)
            if number == 1 and chosen.training.updates_per_step == 1:
                assert_same(sharded, alone, case, 1e-5, parameters)
        assert_same(sharded, alone, case, 1e-4, parameters)
        found, expected = (torch.tensor(learner.token_logprobs(canary_tokens(100))) for learner in (sharded, alone))
        assert torch.allclose(found, expected, atol=1e-4), case
        print(f"{case}: ok", flush=True)


def replay(ranks: Ranks, **trainer: Any) -> None:
    """Updates with replayed routes: all ranks together make those of one process, and others than with live routers."""
    chosen, live = settings("grpo"), settings("grpo")
    chosen.training.router_replay = "recorded"
    for name, value in trainer.items():
        setattr(chosen.trainer, name, value)
    shape = {"sharpness": 1.0, "num_key_value_heads": 2}
    sharded = ShardedLearner(tiny.mixture(**shape), LearnerSettings.of(chosen), ranks)
    alone = LocalLearner(tiny.mixture(**shape), LearnerSettings.of(chosen))
    other = LocalLearner(tiny.mixture(**shape), LearnerSettings.of(live))
    for learner in (sharded, alone, other):
        learner.release_gradients = lambda: None  # type: ignore[method-assign]
    # As the leader sends the step: it alone has the routes.
    found = sharded.train(routed(1) if ranks.leads else for_followers(routed(1)), 1)
    expected, without = (learner.train(routed(1), 1) for learner in (alone, other))
    if ranks.leads:
        assert found["missing_routes"] == expected["missing_routes"]
        assert 0 < found["missing_routes"] < 0.5
    for name in ("loss", "grad_norm", "kl_behaviour"):
        assert math.isclose(found[name], expected[name], rel_tol=1e-4, abs_tol=1e-5), (name, found, expected)
    assert not math.isclose(without["grad_norm"], expected["grad_norm"], rel_tol=1e-3), "the routes make a difference"
    assert_same(sharded, alone, "replay", 1e-5, 1e-5)
    print("replay: ok", flush=True)


def routed(seed: int) -> RolloutBatch:
    """A rollout step with random routes: of the shape of `tiny.mixture`, some unknown, and a sample without any."""
    step, rng = rollout(seed), np.random.default_rng(seed)
    for sample in [sample for group in step.groups for sample in group.samples][1:]:
        tokens = len(sample.prompt_ids) + sample.length - 1
        experts = rng.random((tokens, 2, 4)).argsort(-1)[:, :, :2].astype(np.uint8)
        experts[rng.random(tokens) < 0.1] = 255
        sample.routes = Routes(experts)
    return step


def assert_same(sharded: ShardedLearner, alone: LocalLearner, case: str, gradients: float, parameters: float) -> None:
    for kind in ("model", "critic"):
        if (other := getattr(alone, kind)) is None:
            continue
        own = dict(getattr(sharded, kind).named_parameters())
        for name, parameter in other.named_parameters():
            difference = float((whole(own[name]) - parameter).detach().abs().max())
            assert difference <= parameters, (case, kind, name, difference)
            if parameter.grad is not None:
                error = (whole(own[name].grad) - parameter.grad).norm() / (parameter.grad.norm() + 1e-4)
                assert float(error) <= gradients, (case, kind, name, float(error))


def half(ranks: Ranks) -> None:
    """In bfloat16 the first update equals one process's update up to rounding, and parameters stay in float32."""
    chosen = settings("grpo")
    chosen.model.compute_dtype = "bfloat16"
    sharded = ShardedLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen), ranks)
    alone = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings("grpo")))
    mixed = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen))
    for learner in (sharded, alone, mixed):
        learner.release_gradients = lambda: None  # type: ignore[method-assign]
        learner.train(rollout(1), 1)
    own = dict(sharded.model.named_parameters())
    for name, parameter in alone.model.named_parameters():
        gradient = whole(own[name].grad)
        assert own[name].dtype == gradient.dtype == torch.float32
        error = float((gradient - parameter.grad).norm() / (parameter.grad.norm() + 1e-3))
        assert 0 < error < 0.2, (name, error)
    for name, parameter in mixed.model.named_parameters():
        expected = mixed.masters.of(parameter).grad
        assert float((whole(own[name].grad) - expected).norm() / (expected.norm() + 1e-3)) < 0.1, name
