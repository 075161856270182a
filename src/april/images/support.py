"""Models whose images april reads, and their image processors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from april.extras import install_command
from april.images.store import ImageStore, NoImages

FAMILY = ("qwen2_5_vl", "qwen3_vl")
"""Types of models, as their configurations name them."""
MEDIA_TOKENS = ("video_token_id", "audio_token_id")
"""Settings of configurations that name the placeholders of other media."""


def reads_images(config: Any) -> bool:
    """Whether a model has a part for images."""
    return getattr(config, "vision_config", None) is not None


def no_images(config: Any, name: str) -> NoImages | None:
    """Return why the model of a configuration takes no images; None for a model that takes them.

    Args:
        name: the model, as the reason names it.
    """
    if not reads_images(config):
        return NoImages(f"the policy reads none ({name})")
    if config.model_type not in FAMILY:
        return NoImages(f"april trains {', '.join(FAMILY)} with images, and the policy is {config.model_type}")
    return None


def load_images(path: str, kept: Path | None = None) -> ImageStore | NoImages:
    """Return the images of the model at `path`, a folder or a hub name, whose configuration and tokenizer load.

    Training on text alone needs no image processor: a model without one, or of another family, takes no images.

    Args:
        kept: see `ImageStore`.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if (none := no_images(config, f"model.path = {path!r}, {config.model_type}")) is not None:
        return none
    if find_spec("PIL") is None:
        return NoImages(f"the package pillow is missing: {install_command('images')}")
    from transformers import AutoImageProcessor

    try:
        # The Pillow backend, so that pixels are the same in environments with and without torchvision.
        processor = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
    except Exception as error:  # a missing or damaged file, or a class that transformers does not know
        reason = " ".join(str(error).split())[:200]
        return NoImages(f"{path} has no image processor (preprocessor_config.json): {reason}")
    media = (getattr(config, name, None) for name in MEDIA_TOKENS)
    found = [token for token in media if token is not None]
    begin = getattr(config, "vision_start_token_id", None)
    return ImageStore(processor, config.image_token_id, media=found, begin=begin, kept=kept)
