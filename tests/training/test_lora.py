"""Adapters on a real tiny model, against peft's own reading of them and against the engine that serves them merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from april.algorithms.batch import Batch
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.config.settings.engine_settings import EngineSettings
from april.config.settings.lora_settings import LoraSettings
from april.engines.embedded import EmbeddedEngine
from april.training import lora
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.policy import save_policy
from tests import tiny
from tests.engines import architectures
from tests.training.steps import recipe, rollout
from tests.training.test_local import naive_objective

peft = pytest.importorskip("peft")
IDS = torch.arange(5, 30)[None]


def settings(**algorithm: object) -> Recipe:
    made = recipe(**algorithm)
    made.lora = LoraSettings(rank=4)
    made.training.learning_rate = 2e-2
    return made


def trained(steps: int = 2, **algorithm: object) -> LocalLearner:
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings(**algorithm)), tiny.tokenizer())
    for number in range(1, steps + 1):
        learner.train(rollout(number), number)
    return learner


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_only_adapters_are_trained() -> None:
    start, learner = tiny.model(sharpness=1.0).state_dict(), trained()
    for name, parameter in learner.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, start[name.replace(".base_layer", "")])
    assert any(p.any() for name, p in learner.adapters.state_dict().items() if "lora_B" in name)
    assert sum(p.numel() for group in learner.optimizer.param_groups for p in group["params"]) == sum(
        p.numel() for p in learner.adapters.state_dict().values()
    )


def test_merged_weights_are_equivalent_and_do_not_affect_training() -> None:
    learner = trained()
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    expected, plain = logits(learner.model), tiny.model()
    plain.load_state_dict(dict(learner.adapters.merged()), strict=False)
    torch.testing.assert_close(logits(plain), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(learner.served), expected, atol=1e-5, rtol=1e-5)
    assert list(dict(learner.adapters.merged())) == [name for name, _ in plain.named_parameters()]
    assert (expected - logits(tiny.model(sharpness=1.0))).abs().max() > 1e-2, "training did something"
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_checkpoint_holds_one_merged_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learner, calls = trained(1), list[str]()
    merge, to_host = lora._merged, torch.Tensor.cpu

    def merged(*arguments: Any) -> torch.Tensor:
        calls.append("merge")
        return merge(*arguments)

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("to host")
        return to_host(tensor)

    monkeypatch.setattr(lora, "_merged", merged)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    learner.save_policy(tmp_path)
    assert calls == ["merge", "to host"] * len(learner.adapters.merging())


@torch.no_grad()
def test_the_settings_are_the_adapters() -> None:
    """The chosen layers have adapters that add alpha / rank · B A; what no adapter changes is as it was."""
    chosen = settings()
    chosen.lora = LoraSettings(rank=3, alpha=12, target_modules=("q_proj", "v_proj"))
    model = architectures.model("qwen2")  # with biases in addition to the adapted weights
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters = LocalLearner(model, LearnerSettings.of(chosen)).adapters
    state = adapters.state_dict()
    assert {name.split(".")[-4] for name in state} == {"q_proj", "v_proj"}
    for name, tensor in state.items():
        assert tensor.shape[1 if "lora_B" in name else 0] == 3
        tensor.normal_(std=0.1)
    merged = dict(adapters.merged())
    assert any(name.endswith("q_proj.bias") for name in merged)
    for name, tensor in merged.items():
        owner = name.removesuffix(".weight")
        a, b = (state.get(f"{owner}.lora_{side}.default.weight") for side in "AB")
        torch.testing.assert_close(tensor, start[name] if a is None else start[name] + 4 * b @ a)


async def test_the_engine_records_the_probabilities_of_the_trainer(tmp_path: Path) -> None:
    learner = LocalLearner(
        tiny.model(sharpness=3.0), LearnerSettings.of(settings(kl_coef=0.0)), tiny.tokenizer(), tmp_path
    )
    engine = EmbeddedEngine(learner.served)
    for version in range(1, 4):
        learner.train(rollout(version), version)
        await engine.update_weights(version, learner.weights(version))
        samples = await architectures.run(engine, architectures.samples())
        architectures.assert_behaviour(learner.model, samples, tolerance=1e-4)
    old = tiny.model(sharpness=3.0)
    with pytest.raises(AssertionError, match="sample"):
        architectures.assert_behaviour(old, samples, tolerance=1e-4)


def test_the_reference_is_the_policy_without_adapters() -> None:
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings(kl_coef=0.1)))
    assert learner.reference is None
    assert learner.train(rollout(1), 1)["kl_reference"] == pytest.approx(0, abs=1e-6)
    batch = learner.prepare(rollout(1))
    plain = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(kl_coef=0.1)))
    torch.testing.assert_close(
        batch.reference_logprobs, plain.prepare(rollout(1)).reference_logprobs, atol=1e-5, rtol=1e-5
    )
    assert learner.train(rollout(1), 2)["kl_reference"] > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_adapters_raises_the_probability_of_better_samples(checkpointing: bool) -> None:
    chosen = settings(correction="none")
    chosen.training.gradient_checkpointing = checkpointing
    learner, step = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen)), rollout(2)
    before = naive_objective(learner, step)
    for number in range(1, 6):
        learner.train(step, number)
    assert naive_objective(learner, step) > before + 0.1


def test_a_checkpoint_is_a_whole_model_and_adapters_that_peft_reads(tmp_path: Path) -> None:
    learner = trained()
    learner.save(tmp_path)
    expected = logits(learner.model)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)), expected, atol=1e-5, rtol=1e-5
    )
    wrapped = peft.PeftModel.from_pretrained(tiny.model(sharpness=1.0), tmp_path / "adapter")
    torch.testing.assert_close(logits(wrapped), expected, atol=1e-5, rtol=1e-5)


def test_adapters_alone_can_be_sent_to_an_engine(tmp_path: Path) -> None:
    """The adapters name the policy that they started from; no other weights are written."""
    tiny.model(sharpness=1.0).save_pretrained(tmp_path / "policy")
    chosen = settings()
    chosen.engine = EngineSettings(engine="vllm", weight_transfer="adapters")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    learner = LocalLearner(model, LearnerSettings.of(chosen), tiny.tokenizer(), tmp_path / "run")
    learner.train(rollout(1), 1)
    offered = learner.weights(1)
    assert [path.name for path in offered.glob("*.safetensors")] == ["adapter_model.safetensors"]
    base = json.loads((offered / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str((tmp_path / "policy").absolute())
    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), offered)
    torch.testing.assert_close(logits(wrapped), logits(learner.model))


def test_a_restored_learner_continues_like_the_saved_one(tmp_path: Path) -> None:
    straight, step = trained(kl_coef=0.1), rollout(9)
    straight.save_state(tmp_path)
    torch.manual_seed(123)
    restored = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(settings(kl_coef=0.1)))
    restored.load(tmp_path)
    assert straight.train(step, 3) == restored.train(step, 3)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    trained().save_state(tmp_path)
    with pytest.raises(ValueError, match=r"adapters.* is not asked for.* algorithm, kl_coef and lora settings"):
        LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe())).load(tmp_path)
    other = settings()
    other.lora.rank = 2
    with pytest.raises(ValueError, match="of other settings"):
        LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(other)).load(tmp_path)


@pytest.mark.parametrize(
    ("tied", "targets"),
    [(True, ("embed_tokens",)), (False, ("embed_tokens",)), (False, ("lm_head",)), (False, ("lm_head", "q_proj"))],
)
async def test_adapters_on_the_embedding_and_the_head(tied: bool, targets: tuple[str, ...], tmp_path: Path) -> None:
    """The head is trained, served and stored correctly, adapted itself or tied to an adapted module."""
    chosen = settings(kl_coef=0.1)
    chosen.lora = LoraSettings(rank=4, target_modules=targets)
    model = tiny.model(sharpness=2.0, tie_word_embeddings=tied)
    learner = LocalLearner(model, LearnerSettings.of(chosen), tiny.tokenizer(), tmp_path)
    engine = EmbeddedEngine(learner.served, kv_cache_bytes=1 << 24)
    before = learner.adapters.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    for version in (1, 2):
        metrics = learner.train(rollout(version), version)
    assert metrics["kl_reference"] > 0, "the reference has no adapters"
    moved = {name for name, tensor in learner.adapters.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == set(before)
    await engine.update_weights(2, learner.weights(2))
    samples = await architectures.run(engine, architectures.samples())
    batch = Batch.of(samples, 2)
    with torch.no_grad():
        trained = learner.logprobs(batch)[batch.mask]
    recorded = torch.cat([torch.from_numpy(sample.logprobs) for sample in samples])
    torch.testing.assert_close(trained, recorded, atol=1e-4, rtol=1e-4)
    save_policy(tmp_path / "policy", learner.model, tiny.tokenizer(), learner.adapters)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    architectures.assert_behaviour(stored, samples, tolerance=1e-4)


def test_an_adapter_on_a_tied_head_is_refused() -> None:
    chosen = settings()
    chosen.lora = LoraSettings(rank=4, target_modules=("lm_head",))
    with pytest.raises(ConfigError, match="the head's weights are those of the embedding: name the embedding instead"):
        LocalLearner(tiny.model(), LearnerSettings.of(chosen))


def test_modules_that_do_not_exist_are_named() -> None:
    chosen = settings()
    chosen.lora.target_modules = ("q_prj",)
    with pytest.raises(ConfigError, match=r"lora.target_modules = \('q_prj',\)"):
        LocalLearner(tiny.model(), LearnerSettings.of(chosen))
