"""Memory that runs out, and updates without finite numbers: the policy is never the worse for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from april import RolloutBatch
from april.algorithms.batch import Batch
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.recovery import KEPT, MicroBatchBudget, TrainingError
from tests import tiny
from tests.training.steps import recipe, rollout

SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    MemoryError("std::bad_alloc"),
]


def short_of_memory(learner: LocalLearner, room: int, error: Exception) -> list[int]:
    """Let backward passes of more than `room` tokens fail halfway: the last layer has its gradient, the first has not.

    Returns the sizes of the micro-batches, as they come.
    """
    sizes: list[int] = []

    def counted(_: Any, inputs: tuple[Batch]) -> None:
        sizes.append(inputs[0].input_ids.numel())

    def halfway(gradient: torch.Tensor) -> None:
        if sizes[-1] > room:
            raise error

    learner.policy.register_forward_pre_hook(counted)
    learner.model.base_model.layers[0].input_layernorm.weight.register_hook(halfway)
    return sizes


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: str(error)[:12])
def test_a_batch_that_does_not_fit_is_split_and_has_the_same_gradient(error: Exception) -> None:
    step, learners = (
        rollout(3),
        [LocalLearner(tiny.model(sharpness=2.0), LearnerSettings.of(recipe())) for _ in range(2)],
    )
    sizes = short_of_memory(learners[1], room=120, error=error)
    plain, split = (learner.train(step, 1) for learner in learners)
    assert max(sizes) > 120, "there was a shortage"
    last = sizes[len(sizes) - sizes[::-1].index(next(s for s in sizes[::-1] if s > 120)) :]
    assert max(last) <= 120
    assert split["out_of_memory"] >= 1
    for first, second in zip(*(learner.model.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(second.grad, first.grad, atol=1e-6, rtol=1e-4)
    assert split["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert split["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    sizes.clear()
    assert learners[1].train(step, 2)["out_of_memory"] == 0, "the next step knows"
    assert max(sizes) <= 120


@pytest.mark.parametrize("name", ["optimizer", "critic_optimizer"])
def test_an_optimizer_step_is_repeated_after_a_memory_shortage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other optimizer's with it: the policy would be updated twice."""
    with_critic = recipe()
    with_critic.algorithm.algorithm = "ppo"
    plain, short = (LocalLearner(tiny.model(), LearnerSettings.of(with_critic)) for _ in range(2))
    step, failures = getattr(short, name).step, [SHORTAGES[0]]

    def first_fails() -> None:
        if failures:
            raise failures.pop()
        step()

    monkeypatch.setattr(getattr(short, name), "step", first_fails)
    assert plain.train(rollout(3), 1)["out_of_memory"] == 0
    assert short.train(rollout(3), 1)["out_of_memory"] == 1
    for first, second in zip(*(learner.model.parameters() for learner in (plain, short)), strict=True):
        assert torch.equal(first, second)


def test_the_optimizer_has_its_memory_from_the_start_and_needs_no_more() -> None:
    learner = LocalLearner(tiny.model(), LearnerSettings.of(recipe()))
    held = {name: tensor.data_ptr() for name, tensor in learner.state().items() if "_optimizer." in name}
    assert len(held) == 3 * len(list(learner.model.parameters()))
    assert learner.optimizer.param_groups[0]["fused"], "and makes no copy of the parameters"
    learner.train(rollout(3), 1)
    assert held == {name: tensor.data_ptr() for name, tensor in learner.state().items() if "_optimizer." in name}


def test_too_little_memory_for_one_sample_ends_training_with_a_remedy() -> None:
    learner = LocalLearner(tiny.model(), LearnerSettings.of(recipe()))
    before = [p.clone() for p in learner.model.parameters()]
    short_of_memory(learner, room=0, error=SHORTAGES[0])
    with pytest.raises(TrainingError, match=r"one sample at a time .*gradient_checkpointing"):
        learner.train(rollout(3), 1)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_other_errors_are_no_memory_shortage() -> None:
    def wrong() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        MicroBatchBudget(64).fit(wrong, [8])


def broken_reward(step: RolloutBatch) -> None:
    step.groups[0].samples[0].reward = float("nan")


def test_a_non_finite_update_is_skipped_and_its_batch_saved(tmp_path: Path) -> None:
    learner = LocalLearner(tiny.model(), LearnerSettings.of(recipe()), directory=tmp_path)
    step = rollout(6)
    broken_reward(step)
    before = [p.clone() for p in learner.model.parameters()]
    metrics = learner.train(step, 12)
    assert metrics["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    assert not any(moment.any() for state in learner.optimizer.state.values() for moment in state.values())
    kept = load_file(tmp_path / "skipped" / "step-000012-0.safetensors")
    record = json.loads((tmp_path / "skipped" / "step-000012-0.json").read_text())
    sample = step.groups[1].samples[2]
    row = [s["id"] for s in record["samples"]].index(sample.id)
    ids = [*sample.prompt_ids, *sample.response_ids]
    assert kept["input_ids"][row, : record["lengths"][row]].tolist() == ids
    assert record["measured"] == {"loss": "nan", "grad_norm": "nan"}
    assert {"rollout_logprobs", "token_staleness", "advantages", "mask"} <= kept.keys()


def test_only_skipped_updates_in_a_row_stop_the_training(tmp_path: Path) -> None:
    settings = recipe()
    settings.training.max_skipped_updates = 2
    learner = LocalLearner(tiny.model(), LearnerSettings.of(settings), directory=tmp_path)
    good, bad = rollout(6), rollout(6)
    broken_reward(bad)
    for number in range(3):
        assert learner.train(bad, 2 * number + 1)["skipped_updates"] == 1
        assert learner.train(good, 2 * number + 2)["skipped_updates"] == 0
    learner.train(bad, 7)
    with pytest.raises(TrainingError, match=r"2 updates in a row .*the last: loss nan.*step-000008-0\.safetensors"):
        learner.train(bad, 8)


def test_of_many_skipped_updates_the_newest_are_kept(tmp_path: Path) -> None:
    settings = recipe()
    settings.training.max_skipped_updates = 100
    learner = LocalLearner(tiny.model(), LearnerSettings.of(settings), directory=tmp_path)
    bad = rollout(6)
    broken_reward(bad)
    for number in range(1, KEPT + 6):
        learner.train(bad, number)
    kept = tmp_path / "skipped"
    assert sorted(path.stem for path in kept.glob("*.json")) == [f"step-{n:06d}-0" for n in range(6, KEPT + 6)]
    assert len(list(kept.iterdir())) == 2 * KEPT
