"""Float32 parameters with bfloat16 computation: small updates arrive, and trainer and engine compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoModelForCausalLM

from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.embedded.model import ServedModel
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.update_share import UpdateShare
from tests import tiny
from tests.training.steps import recipe, rollout


def half(dtype: Any = "float32", rate: float = 1e-6, **algorithm: Any) -> Recipe:
    """A recipe that computes in bfloat16, with parameters in `dtype`."""
    made = recipe(**algorithm)
    made.model.dtype, made.model.compute_dtype = dtype, "bfloat16"
    made.training.learning_rate = rate
    return made


def share_changed(learner: LocalLearner, steps: int) -> float:
    """Share of the parameters with a gradient that differ after `steps` steps."""
    trained = learner.masters.trained(learner.model)
    before = [tensor.detach().clone() for tensor in trained]
    met = [torch.zeros_like(tensor, dtype=torch.bool) for tensor in trained]
    learner.release_gradients = lambda: None  # type: ignore[method-assign]
    for number in range(1, steps + 1):
        learner.train(rollout(number), number)
        for seen, tensor in zip(met, trained, strict=True):
            assert tensor.grad is not None
            seen |= tensor.grad != 0
    counts = [(seen.sum(), ((old != new) & seen).sum()) for seen, old, new in zip(met, before, trained, strict=True)]
    return float(sum(changed for _, changed in counts) / sum(count for count, _ in counts))


def test_small_updates_change_nearly_all_parameters() -> None:
    assert share_changed(LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(half())), 10) > 0.99
    rounded = LocalLearner(tiny.model(sharpness=1.0).to(torch.bfloat16), LearnerSettings.of(half("bfloat16")))
    assert share_changed(rounded, 10) < 0.1, "of which parameters in bfloat16 lose most"


def test_losses_in_bfloat16_follow_losses_in_float32() -> None:
    curves = []
    for computes in ("float32", "bfloat16"):
        settings = half(rate=1e-3)
        settings.model.compute_dtype = computes  # type: ignore[assignment]
        learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings))
        curves.append([learner.train(rollout(1), number)["loss"] for number in range(1, 9)])
    wide, narrow = (torch.tensor(curve) for curve in curves)
    assert (wide - narrow).abs().max() < 0.02 * (wide[0] - wide[-1])


def test_the_share_of_changed_parameters_is_a_metric(caplog: pytest.LogCaptureFixture) -> None:
    wide = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(half()))
    assert wide.train(rollout(1), 1)["updated_share"] > 0.99
    assert not caplog.messages
    narrow = LocalLearner(tiny.model(sharpness=1.0).to(torch.bfloat16), LearnerSettings.of(half("bfloat16")))
    narrow.release_gradients = lambda: None  # type: ignore[method-assign]
    trained = [parameter.clone() for parameter in narrow.model.parameters()]
    for number in (1, 2):
        found = narrow.train(rollout(number), number)["updated_share"]
        before, trained = trained, [parameter.clone() for parameter in narrow.model.parameters()]
        moved = [
            ((a != b) & (b_.grad != 0)).sum()
            for a, b, b_ in zip(before, trained, narrow.model.parameters(), strict=True)
        ]
        having = sum((parameter.grad != 0).sum() for parameter in narrow.model.parameters())
        assert found == pytest.approx(float(sum(moved) / having), abs=0.03)
    assert sum("set model.dtype to float32" in message for message in caplog.messages) == 1


def test_an_update_is_watched_without_waiting_for_the_device() -> None:
    """On a tensor without values, whatever needs a value raises."""
    with FakeTensorMode():
        weight = torch.zeros(300, 4, device="cuda")
        weight.grad = torch.ones_like(weight)
        watched = UpdateShare([weight])
        with watched.of():
            weight.add_(1)
        with pytest.raises(DataDependentOutputException):
            watched.take()


@pytest.mark.parametrize("algorithm", [{}, {"algorithm": "ppo", "kl_coef": 0.1}], ids=["grpo", "ppo"])
def test_a_run_resumes_from_its_checkpoint_bit_for_bit(algorithm: dict[str, Any], tmp_path: Path) -> None:
    settings = half(**algorithm)
    first = LocalLearner(tiny.model(), LearnerSettings.of(settings), tiny.tokenizer())
    first.train(rollout(1), 1)
    first.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    second = LocalLearner(policy, LearnerSettings.of(settings), tiny.tokenizer())
    second.load(tmp_path)
    for learner in (first, second):
        learner.train(rollout(2), 2)
    for a, b in zip(first._trained(), second._trained(), strict=True):
        for one, other in zip(first.masters.trained(a), second.masters.trained(b), strict=True):
            assert torch.equal(one, other)


def test_the_engine_computes_with_the_parameters_that_training_rounds() -> None:
    learner = LocalLearner(tiny.model(), LearnerSettings.of(half(rate=1e-2)))
    served = ServedModel(learner.served)
    learner.train(rollout(1), 1)
    own = dict(learner.model.named_parameters())
    for name, parameter in served.module.named_parameters():
        assert parameter.data_ptr() == own[name].data_ptr()
        assert torch.equal(parameter, learner.masters.of(own[name]).to(torch.bfloat16))


def test_a_copy_in_a_different_type_keeps_its_rotary_frequencies() -> None:
    policy = tiny.model()
    served = ServedModel(policy, torch.bfloat16)
    assert torch.equal(served.module.model.rotary_emb.inv_freq, policy.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("dtype", "device", "found"),
    [
        ("float32", "cpu", "float32"),
        ("float32", "cuda", "bfloat16"),
        ("float32", "cuda:1", "bfloat16"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
@pytest.mark.parametrize("backend", ["local", "fsdp2", "megatron"])
def test_gpus_compute_in_bfloat16_by_default(dtype: Any, device: str, found: str, backend: Any) -> None:
    made = Recipe()
    made.model.dtype, made.model.device, made.trainer.backend = dtype, device, backend
    assert made.compute_dtype == found
    made.model.compute_dtype = "float32"
    assert made.compute_dtype == "float32"


def refused(made: Recipe) -> str:
    with pytest.raises(ConfigError) as error:
        check_recipe(made)
    return "\n".join(line for line in str(error.value).splitlines() if line.startswith("model.") and "path" not in line)


@pytest.mark.parametrize(
    ("rate", "rank", "wrong"), [(1e-6, 0, True), (1e-5, 0, True), (1e-4, 0, False), (1e-6, 8, False)]
)
def test_bfloat16_parameters_are_refused_at_rates_that_round_updates_away(rate: float, rank: int, wrong: bool) -> None:
    made = half("bfloat16", rate)
    made.lora.rank = rank
    assert ("rounds such updates away" in refused(made)) == wrong


def test_wider_computation_than_the_parameters_is_refused() -> None:
    made = half("bfloat16", 1e-3)
    made.model.compute_dtype = "float32"
    assert 'set model.dtype = "float32"' in refused(made)
