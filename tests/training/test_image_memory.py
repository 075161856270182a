"""The memory of a vision tower matches its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from april import Group, SamplingParams
from april.algorithms.batch import Batch
from april.commands.main import run as april
from april.config.recipe import Recipe
from april.images.model_inputs import KEPT_BYTES
from april.rollout.trajectory.prompt import Prompt
from april.training.kv_budget import kv_cache_bytes
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.memory_check import phases
from april.training.memory_plan import pass_bytes, plan_memory
from tests import tiny, vision
from tests.images.test_model_inputs import encode
from tests.training.saved_bytes import saved_bytes
from tests.training.steps import recipe

LARGEST = 64
"""Pixels in height and width of the largest image that the image processor makes, which has as many embeddings."""


def chosen(directory: Path, architecture: str = "Qwen3VL") -> Recipe:
    made = recipe()
    made.model.path = str(vision.save(directory / "policy", architecture, sharpness=1.0))
    made.task = replace(made.task, kind="records", path="records.jsonl", image_column="images")
    return made


def kept(made: Recipe, batch: Batch, architecture: str) -> int:
    """Return the bytes that a real forward pass of a batch keeps for its backward pass."""
    learner = LocalLearner(
        vision.model(architecture, sharpness=1.0), LearnerSettings.of(made), images=vision.image_store()
    )
    return saved_bytes(learner, batch)


def samples_of(prompts: Sequence[Prompt]) -> Batch:
    samples = [s for i, prompt in enumerate(prompts) for s in Group.start(i, prompt, 1, SamplingParams(8), 0).samples]
    for sample in samples:
        sample.extend([40] * 8, [-1.0] * 8, 0)
    return Batch.of(samples, 0)


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
def test_planned_activations_of_images_match_a_real_forward_pass(architecture: str, tmp_path: Path) -> None:
    store, size = vision.image_store(), (LARGEST, LARGEST)
    pictures = [vision.picture(tmp_path / f"{number}.png", size, mark=number) for number in range(3)]
    prompts = [encode(store, picture, "What is it?") for picture in pictures]
    batch, text = samples_of(prompts), samples_of([Prompt(prompt.token_ids, "text") for prompt in prompts])
    made = chosen(tmp_path, architecture)
    made.training.max_tokens_per_micro_batch = sum(batch.lengths)
    made.rollout.max_response_length = sum(batch.lengths) // 3
    held, of_text = kept(made, batch, architecture), kept(made, text, architecture)
    plan = plan_memory(made).rank
    assert 0.75 < (held - of_text) / plan["images"] < 1.35
    assert 0.75 < held / (plan["activations"] + plan["images"]) < 1.35

    made.training.gradient_checkpointing = True
    # Inputs of layers, and what one layer computes again, are not among the saved tensors.
    outside = kept(made, batch, architecture) - kept(made, text, architecture)
    assert outside < plan_memory(made).rank["images"] < plan["images"]


def test_images_are_as_large_as_the_processor_and_prompts_allow(tmp_path: Path) -> None:
    made = chosen(tmp_path)
    made.training.max_tokens_per_micro_batch, made.rollout.max_response_length = 128, 64
    two = plan_memory(made).rank["images"]
    made.training.max_tokens_per_micro_batch = 64
    assert plan_memory(made).rank["images"] == two // 2, "of 64 embeddings, which one sample has"
    made.training.max_tokens_per_micro_batch, made.rollout.max_response_length = 32, 32
    assert plan_memory(made).rank["images"] == two // 2, "an image is computed whole"
    made.rollout.max_prompt_length = 16
    assert plan_memory(made).rank["images"] == two // 8
    made.task = replace(made.task, image_column=None)
    assert "images" not in plan_memory(made).rank


def test_a_tower_without_adapters_keeps_nothing_for_the_backward_pass(tmp_path: Path) -> None:
    made = chosen(tmp_path)
    trained = plan_memory(made).rank["images"]
    made.lora.rank = 4
    assert plan_memory(made).rank["images"] < trained / 4
    made.lora.target_modules = ("q_proj", "qkv")
    assert plan_memory(made).rank["images"] == trained


def test_the_engine_has_room_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = chosen(tmp_path)
    with_images = pass_bytes(made)
    assert phases(plan_memory(made), made)[0].parts["pass"] == with_images
    monkeypatch.setattr("april.training.kv_budget.free_bytes", lambda _: 10**10)
    room = kv_cache_bytes(made, torch.device("cpu"))
    made.task = replace(made.task, image_column=None)
    # Its kept embeddings, and the patches of two images and of a prefill chunk.
    patches = 4 * (made.engine.prefill_chunk + 2 * 64)
    assert with_images - pass_bytes(made) == KEPT_BYTES + patches * (4 * (6 * 16 + 3 * 32) + 4 * 3 * 2 * 16)
    assert room < kv_cache_bytes(made, torch.device("cpu"))


def test_commands_name_the_memory_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, records = chosen(tmp_path).model.path, tmp_path / "records.jsonl"
    records.write_text("")
    given = ["memory", "--model.path", path, "--task.kind", "records", "--task.path", str(records)]
    given += ["--task.image-column", "images", "--task.answer-column", "answer", "--max-response-length", "64"]
    assert april([*given, "--gpu-memory", "4"]) == 0
    assert "  images " in capsys.readouterr().out
    text = str(tiny.save(tmp_path / "text", sharpness=1.0))
    assert april([*given, "--model.path", text]) == 2
    assert "task.image_column = 'images': the policy reads none" in capsys.readouterr().err
    (Path(path) / "preprocessor_config.json").unlink()
    assert april(given) == 2
    assert "has no image processor (preprocessor_config.json)" in capsys.readouterr().err
