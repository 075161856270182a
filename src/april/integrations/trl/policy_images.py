"""Images for the policy of a TRL trainer, computed by the image processor that TRL's loss computes them with."""

from __future__ import annotations

from typing import Any

from april.images.store import ImageStore, NoImages
from april.images.support import no_images


def policy_images(trainer: Any) -> ImageStore | NoImages:
    """Return the images of a trainer with a processor, or the reason why its policy takes none."""
    config = trainer.model.config
    if (none := no_images(config, config.model_type)) is not None:
        return none
    placeholder: int = config.image_token_id
    # As TRL's own generation: its forward pass takes every placeholder for a part of an image.
    return ImageStore(trainer.processing_class.image_processor, placeholder, undrawn=(placeholder,))
