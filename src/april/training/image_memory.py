"""Memory of a vision tower: its activations in training, and in a pass of the embedded engine.

Activations grow linearly with patches, because attention kernels do not store scores; so they are counted for a small
image. Images are as large as the image processor and the longest prompt allow, and prompts have one each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from april.config.recipe import Recipe
from april.images.model_inputs import KEPT_BYTES, patch_values
from april.images.store import ImageStore
from april.training.activations import activation_bytes, layer_bytes
from april.training.context import context_of, prompt_limit
from april.training.lora import outside_language_model
from april.training.policy import trunk_of
from april.training.run_images import run_images

COUNTED = 4
"""Height and width of the image whose activations are counted, in embeddings."""
PIXEL = 4
"""Bytes of a value of a pixel: images are float32 on the device, also if the model computes in another type."""


def training_image_bytes(model: nn.Module, recipe: Recipe, computed: int, activations: int) -> int:
    """Return the bytes of a micro-batch's images, in addition to the activations of the text layers.

    Args:
        model: the policy in the type that training computes with, without values. Called outside of their mode,
            because lengths that attention computes from the grid of an image need values.
        computed: bytes of an element of that type.
        activations: bytes of the activations of the text layers, which follow a tower without gradients.

    Raises:
        ConfigError: the policy takes no images.
    """
    trunk = trunk_of(model)
    embeddings = _trained_embeddings(recipe, trunk.config)
    config = trunk.config.vision_config
    side: int = config.spatial_merge_size
    patches = embeddings * side**2
    if recipe.lora.rank and not _has_adapters(model, trunk.visual, recipe):
        return max(0, _forward_bytes(config, patches, computed) - activations)
    shape = (COUNTED * side) ** 2, patch_values(config)
    pixels = next(trunk.visual.parameters()).new_zeros(shape, dtype=torch.float32)
    grid = torch.tensor([[1, COUNTED * side, COUNTED * side]])

    def forward() -> Tensor:
        hidden: Tensor = trunk.get_image_features(pixels, grid, return_dict=True).last_hidden_state
        return hidden

    counted = activation_bytes(trunk, trunk.visual, forward, computed, recipe.training.gradient_checkpointing)
    return counted * patches // shape[0]


def engine_image_bytes(config: Any, recipe: Recipe, computed: int) -> int:
    """Return the bytes of images in a pass of the embedded engine, and of the embeddings that it keeps.

    Raises:
        ConfigError: the policy takes no images.
    """
    # Images are computed whole: those inside a prefill chunk, and one at each of its ends.
    embeddings = recipe.engine.prefill_chunk + 2 * _largest_image(recipe, config)
    part = config.vision_config
    return _forward_bytes(part, embeddings * part.spatial_merge_size**2, computed) + KEPT_BYTES


def _forward_bytes(config: Any, patches: int, computed: int) -> int:
    """Return the bytes of patches in a forward pass without gradients: pixels, and the activations of a layer."""
    return layer_bytes(config, patches, computed) + patches * patch_values(config) * PIXEL


def _trained_embeddings(recipe: Recipe, config: Any) -> int:
    """Return the embeddings of a micro-batch of samples with responses of full length: tokens of the micro-batch, but
    at least one image."""
    tokens, image = recipe.training.max_tokens_per_micro_batch, _largest_image(recipe, config)
    samples = max(tokens // recipe.rollout.max_response_length, 1)
    return max(min(samples * image, tokens), image)


def _largest_image(recipe: Recipe, config: Any) -> int:
    """Return the number of embeddings of the largest image."""
    store = run_images(recipe)
    assert isinstance(store, ImageStore), "the recipe has images"
    limits = store.largest, prompt_limit(recipe.rollout, recipe.engine, context_of(config))
    known = [limit for limit in limits if limit is not None]
    return min(known, default=recipe.training.max_tokens_per_micro_batch)


def _has_adapters(model: nn.Module, tower: nn.Module, recipe: Recipe) -> bool:
    excluded, own = set(outside_language_model(model, recipe.lora.target_modules)), set(tower.modules())
    leaves = [name for name, module in model.named_modules() if module in own and not any(module.children())]
    return any(name not in excluded for name in leaves)
