"""Adapters of policies that read images: on the language model, and on the vision tower if they name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from april.config.settings.lora_settings import LoraSettings
from april.engines.embedded import EmbeddedEngine
from april.images.store import ImageStore
from april.rollout.trajectory.prompt import Prompt
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.memory_plan import _adapters
from tests import vision
from tests.images.test_model_inputs import own_inputs
from tests.training.steps import recipe, rollout
from tests.training.test_images import generate, prompts, recorded, samples_of, scores, store

peft = pytest.importorskip("peft")
__all__ = ["prompts", "store"]
TARGETS = {"unset": (), "both": ("q_proj", "gate_proj", "qkv")}


def learner_of(
    architecture: str, store: ImageStore, directory: Path | None = None, targets: tuple[str, ...] = ()
) -> LocalLearner:
    chosen = recipe()
    chosen.lora = LoraSettings(rank=4, target_modules=targets)
    chosen.training.learning_rate = 2e-2
    policy = vision.model(architecture, sharpness=3.0)
    return LocalLearner(policy, LearnerSettings.of(chosen), vision.tokenizer(), directory, store)


def adapted(learner: LocalLearner) -> set[str]:
    assert learner.adapters is not None
    return {name.split(".lora_")[0] for name in learner.adapters.state_dict()}


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
def test_the_vision_tower_has_adapters_if_a_target_names_it_alone(architecture: str, store: ImageStore) -> None:
    """Both parts of Qwen2.5-VL have a gate_proj: the name means the language model's."""
    found = adapted(learner_of(architecture, store))
    assert {name.split(".")[1] for name in found} == {"language_model"}
    assert len(found) == 3 * 7
    both = adapted(learner_of(architecture, store, targets=TARGETS["both"]))
    assert sorted({(name.split(".")[1], name.split(".")[-1]) for name in both}) == [
        ("language_model", "gate_proj"),
        ("language_model", "q_proj"),
        ("visual", "qkv"),
    ]


@pytest.mark.parametrize("targets", TARGETS)
def test_the_memory_plan_counts_the_adapters_that_are_made(targets: str, store: ImageStore) -> None:
    chosen = recipe()
    chosen.lora = LoraSettings(rank=4, target_modules=TARGETS[targets])
    learner = learner_of("Qwen2_5_VL", store, targets=TARGETS[targets])
    expected = sum(tensor.numel() for tensor in learner.adapters.state_dict().values())
    assert _adapters(vision.model("Qwen2_5_VL"), chosen) == expected


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
async def test_the_engine_records_the_probabilities_of_the_trainer(
    architecture: str, targets: str, store: ImageStore, prompts: list[Prompt], tmp_path: Path
) -> None:
    learner = learner_of(architecture, store, tmp_path, TARGETS[targets])
    engine = EmbeddedEngine(learner.served, images=store)
    start = {name: tensor.clone() for name, tensor in learner.adapters.state_dict().items()}
    for version in range(1, 3):
        learner.train(rollout(version, prompts=prompts), version)
        await engine.update_weights(version, learner.weights(version))
    assert all(not torch.equal(tensor, start[name]) for name, tensor in learner.adapters.state_dict().items())
    samples = samples_of(prompts)
    await generate(engine, samples, interrupt=3)
    for packed in (False, True):
        assert (scores(learner.model, store, samples, packed) - recorded(samples)).abs().max() < 1e-4
    old = vision.model(architecture, sharpness=3.0)
    assert (scores(old, store, samples, False) - recorded(samples)).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
@torch.no_grad()
def test_checkpoints_have_merged_weights_and_adapters_that_peft_loads(
    architecture: str, store: ImageStore, prompts: list[Prompt], tmp_path: Path
) -> None:
    learner = learner_of(architecture, store, targets=TARGETS["both"])
    with torch.enable_grad():
        learner.train(rollout(1, prompts=prompts), 1)
    learner.save(tmp_path)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    plain = vision.model(architecture, sharpness=3.0)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")

    def logits(policy: Any) -> torch.Tensor:
        ids = torch.tensor([prompts[0].token_ids])
        return policy(input_ids=ids, use_cache=False, **own_inputs(store, prompts[0])).logits

    expected = logits(learner.served)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(loaded), expected, atol=1e-4, rtol=1e-4)
    assert (expected - logits(vision.model(architecture, sharpness=3.0))).abs().max() > 1e-2
    resumed = learner_of(architecture, store, targets=TARGETS["both"])
    resumed.load(tmp_path)
    torch.testing.assert_close(logits(resumed.served), expected, atol=1e-5, rtol=1e-5)
