"""A model's inputs for prompts with images: equal to what transformers computes from pixels, whole or in pieces."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from april.images.model_inputs import ModelImages, Run
from april.images.store import ImageStore
from april.rollout.trajectory.prompt import Prompt
from april.tasks.encoding import Encoder
from april.tasks.task import Problem
from tests import vision


@pytest.fixture
def store() -> ImageStore:
    return vision.image_store()


def encode(store: ImageStore, *parts: str) -> Prompt:
    """A prompt of texts and of images, whose paths end in .png."""
    content = [
        {"type": "image", "image": part} if part.endswith(".png") else {"type": "text", "text": part} for part in parts
    ]
    return Encoder(vision.tokenizer(), images=store)(Problem("p", [{"role": "user", "content": content}]))


def own_inputs(store: ImageStore, prompt: Prompt) -> dict[str, Any]:
    """Inputs of transformers' own forward pass."""
    pixels = [store.pixels(feature) for feature in prompt.features]
    kinds = torch.zeros(1, len(prompt.token_ids), dtype=torch.int)
    for feature in prompt.features:
        kinds[0, feature.offset : feature.end] = 1
    return {
        "pixel_values": torch.from_numpy(np.concatenate([one.patches for one in pixels])),
        "image_grid_thw": torch.tensor([one.grid for one in pixels]),
        "mm_token_type_ids": kinds,
    }


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
@torch.no_grad()
def test_text_layers_get_what_transformers_computes_from_pixels(
    architecture: str, store: ImageStore, tmp_path: Path
) -> None:
    first, second = vision.picture(tmp_path / "1.png", (40, 24), "blue"), vision.picture(tmp_path / "2.png", mark=8)
    prompts = [encode(store, "Is ", first, " like ", second, "?"), encode(store, "Plain"), encode(store, second, "?")]
    policy = vision.model(architecture)
    images = ModelImages(policy.base_model, store)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.tensor([[*prompt.token_ids, *[0] * (longest - len(prompt.token_ids))] for prompt in prompts])
    runs = [Run(row, 0, 0, len(prompt.token_ids), prompt.features) for row, prompt in enumerate(prompts)]
    found = policy.base_model.language_model(**images.inputs(ids, runs), use_cache=False).last_hidden_state
    for row, prompt in enumerate(prompts):
        more = own_inputs(store, prompt) if prompt.features else {}
        expected = policy.base_model(input_ids=torch.tensor([prompt.token_ids]), use_cache=False, **more)
        assert (found[row, : len(prompt.token_ids)] - expected.last_hidden_state[0]).abs().max() < 1e-4
        if prompt.features:  # without its images, something else is computed
            blind = policy.base_model(input_ids=torch.tensor([prompt.token_ids]), use_cache=False).last_hidden_state[0]
            assert (found[row, : len(prompt.token_ids)] - blind).abs().max() > 1e-2


def test_a_prompt_has_the_placeholders_of_transformers_processor(store: ImageStore, tmp_path: Path) -> None:
    """The processor itself needs torchvision, for its videos."""
    for number, size in enumerate([(8, 8), (100, 30), (61, 44), (300, 300)]):
        path = vision.picture(tmp_path / f"{number}.png", size)
        prompt = encode(store, "a", path, "b")
        [feature] = prompt.features
        made = vision.image_processor()(images=[Image.open(path)], return_tensors="np")
        processor = SimpleNamespace(image_processor=vision.image_processor(), image_token="<|image_pad|>")
        text = Qwen3VLProcessor.replace_image_token(processor, made, 0)
        assert vision.tokenizer()(text).input_ids == list(prompt.token_ids[feature.offset : feature.end])
        assert prompt.token_ids.count(vision.PLACEHOLDER) == feature.length


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100])
def test_pieces_of_a_sequence_have_the_inputs_of_the_whole(piece: int, store: ImageStore, tmp_path: Path) -> None:
    """A policy may sample placeholders: they are text."""
    prompt = encode(store, vision.picture(tmp_path / "1.png", (40, 24)), " and ", vision.picture(tmp_path / "2.png"))
    ids = [*prompt.token_ids, 40, vision.PLACEHOLDER, 41]
    images = ModelImages(vision.model().base_model, store, keeps=True)
    whole = images.inputs(torch.tensor([ids]), [Run(0, 0, 0, len(ids), prompt.features)])
    parts = []
    for start in range(0, len(ids), piece):
        cut = torch.tensor([ids[start : start + piece]])
        parts.append(images.inputs(cut, [Run(0, 0, start, cut.shape[1], prompt.features)]))
    for name in ("inputs_embeds", "position_ids"):
        axis = 1 if name == "inputs_embeds" else 2
        assert torch.equal(torch.cat([part[name] for part in parts], axis), whole[name])
    own = images.trunk.get_input_embeddings()(torch.tensor([ids]))[0]
    assert torch.equal(whole["inputs_embeds"][0, -3:], own[-3:])
    held = [part for part in parts if "visual_pos_masks" in part]
    for layer, values in enumerate(whole["deepstack_visual_embeds"]):
        assert torch.equal(torch.cat([part["deepstack_visual_embeds"][layer] for part in held]), values)


def test_positions_that_were_dropped_are_computed_again(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("april.images.model_inputs.KEPT_POSITIONS", 0)
    monkeypatch.setattr("april.images.model_inputs.KEPT_DISTANCES", 1)
    sizes = [(40, 24), (16, 24), (24, 24)]
    prompts = [encode(store, vision.picture(tmp_path / f"{i}.png", size)) for i, size in enumerate(sizes)]
    images, unlimited = (ModelImages(vision.model().base_model, store) for _ in range(2))
    for prompt in [*prompts, *reversed(prompts)]:
        end = len(prompt.token_ids)
        for run in (Run(0, 0, 0, end + 2, prompt.features), Run(0, 0, end + 1, 1, prompt.features)):
            whole = unlimited.positions(Run(0, 0, 0, end + 2, prompt.features))
            assert np.array_equal(images.positions(run), whole[:, run.start : run.start + run.length])
    assert len(images._positions) == len(images._distances) == 1
