"""Whether a run fits its GPUs is known before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from april.commands.main import run as april
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.training import build, memory_check, memory_plan
from april.training.kv_budget import SHARES, kv_cache_bytes
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.memory_check import check_memory, phases
from april.training.memory_plan import USABLE, MemoryPlan, pass_bytes, plan_memory
from tests import tiny
from tests.training.steps import recipe, rollout


@pytest.fixture
def chosen(tmp_path: Path) -> Recipe:
    made = recipe()
    made.model.path = str(tiny.save(tmp_path / "policy", sharpness=1.0))
    return made


def test_master_weights_their_copy_and_the_optimizer_are_counted_to_the_byte(chosen: Recipe) -> None:
    chosen.model.compute_dtype = "bfloat16"
    plan = plan_memory(chosen)
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen))
    learner.release_gradients = lambda: None  # type: ignore[method-assign]
    learner.train(rollout(1), 1)
    masters = learner.masters.trained(learner.model)
    assert plan.rank["parameters"] == sum(tensor.nbytes for tensor in masters)
    assert plan.rank["rounded copy"] == sum(parameter.nbytes for parameter in learner.model.parameters())
    assert plan.rank["gradients"] == sum(tensor.grad.nbytes for tensor in masters if tensor.grad is not None)
    assert plan.first["engine's weights"] == 0, "the engine computes with the copy"


@pytest.mark.parametrize(("algorithm", "computed"), [("grpo", "bfloat16"), ("ppo", "float32")])
def test_generation_begins_without_gradients(algorithm: str, computed: Any, chosen: Recipe) -> None:
    chosen.algorithm.algorithm, chosen.model.compute_dtype = algorithm, computed
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen))
    assert learner.train(rollout(1), 1)["grad_norm"] > 0
    modules = filter(None, (learner.policy, learner.critic))
    held = [tensor for module in modules for tensor in (*module.parameters(), *learner.masters.trained(module))]
    assert all(tensor.grad is None for tensor in held)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_memory_of_a_phase_is_the_sum_of_its_parts(policy: Any, chosen: Recipe) -> None:
    chosen.engine.on_update, chosen.engine.kv_cache_gb = policy, 0.5
    plan = plan_memory(chosen)
    resident = sum(plan.rank[name] for name in ("parameters", "rounded copy", "optimizer"))
    cache = 500_000_000
    kept = cache if policy == "keep" else 0
    generation, training, update = phases(plan, chosen)
    assert generation.total == resident + plan.engine_pass + cache
    assert training.total == sum(plan.rank.values()) + kept
    assert update.total == resident + kept


@pytest.mark.parametrize(("transfer", "buckets"), [("disk", 2 * 2**26), ("broadcast", 2 * 2**26 + 2 * 2**28)])
def test_a_weight_update_holds_the_buckets_of_its_transfer(transfer: Any, buckets: int, chosen: Recipe) -> None:
    chosen.engine.engine, chosen.engine.weight_transfer = "vllm", transfer
    plan = plan_memory(chosen)
    *_, update = phases(plan, chosen)
    assert update.total == sum(plan.rank[name] for name in ("parameters", "rounded copy", "optimizer")) + buckets


def test_the_kv_cache_may_use_the_memory_that_the_trainer_leaves(
    chosen: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr("april.training.kv_budget.free_bytes", lambda _: 10**9)
    assert kv_cache_bytes(chosen, device) == int((10**9 - pass_bytes(chosen)) * SHARES["cpu"])
    chosen.engine.on_update = "keep"
    to_come = pass_bytes(chosen) + plan_memory(chosen).transient_bytes
    assert kv_cache_bytes(chosen, device) == int((10**9 - to_come) * SHARES["cpu"])
    chosen.engine.kv_cache_gb = 0.25
    assert kv_cache_bytes(chosen, device) == 250_000_000


@pytest.mark.parametrize(("transfer", "copies"), [("disk", 2), ("broadcast", 4)])
def test_a_bucket_holds_the_largest_tensor_whole(transfer: Any, copies: int, chosen: Recipe) -> None:
    """Such as the head of a large vocabulary, or all experts of a layer."""
    chosen.engine.engine, chosen.engine.weight_transfer = "vllm", transfer
    config = tiny.model().config
    config.vocab_size = 2**24
    config.save_pretrained(chosen.model.path)
    plan = plan_memory(chosen)
    assert plan.largest == 2**24 * config.hidden_size * getattr(torch, chosen.compute_dtype).itemsize
    assert plan.largest > 2**28
    assert phases(plan, chosen)[2].parts["bucket"] == copies * plan.largest


async def test_a_run_plans_its_memory_once(chosen: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans, make = [], memory_plan.plan_memory

    def counted(recipe: Recipe) -> MemoryPlan:
        plans.append(recipe)
        return make(recipe)

    class Started(Exception):
        pass

    def start(*_: Any, **named: Any) -> None:
        raise Started

    monkeypatch.setattr(memory_check, "plan_memory", counted)
    monkeypatch.setattr(build, "gpu_bytes", lambda _: 1 << 50)
    monkeypatch.setattr(build, "open_engine", start)
    chosen.reporting.output, chosen.trainer.layout = str(tmp_path / "run"), "shared"
    with pytest.raises(Started):
        await build.train(chosen)
    assert len(plans) == 1


async def test_a_run_that_does_not_fit_its_gpu_ends_before_the_model_is_loaded(
    chosen: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen.reporting.output = str(tmp_path / "run")
    monkeypatch.setattr(build, "gpu_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(build, "load_policy", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"memory: generation takes .*trainer\.processes = 8"):
        await build.train(chosen)


def test_estimates_alone_do_not_end_a_run(chosen: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    chosen.training.max_tokens_per_micro_batch = 1 << 14
    plan = plan_memory(chosen)
    training = phases(plan, chosen)[1]
    check_memory(chosen, plan, (training.fixed + training.total) / 2 / USABLE)
    assert "training takes" in caplog.text
    assert "set training.gradient_checkpointing = true" in caplog.text


def test_a_named_shape_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["memory", "--model", "r1-distill-1.5b", "--gpu-memory"]
    assert april([*small, "80"]) == 0
    shown = capsys.readouterr().out
    assert "1.777 B parameters, float32, computed in bfloat16" in shown
    assert shown.count(": fits") == 3
    assert "samples of full length" in shown
    assert april([*small, "24"]) == 0
    shown = capsys.readouterr().out
    assert "training" in shown
    assert "does not fit; set training.gradient_checkpointing = true and " in shown
    assert "trainer.processes = 2" in shown


def test_a_configuration_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.model().config.save_pretrained(tmp_path)
    assert april(["memory", "--model.path", str(tmp_path), "--gpu-memory", "1"]) == 0
    assert capsys.readouterr().out.count(": fits") == 3
