"""Images of requests to servers, read and processed where requests are sent.

Invariant: a server gets an image only if its bytes have the hash that they had when the prompt was encoded, and the
prompt has one placeholder for each of its embeddings.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from april.engines.servers.local_model import local_config, local_image_processor
from april.images.source import ImageError
from april.images.store import ImageStore
from april.images.support import load_images
from april.rollout.trajectory.features import Feature

SAME_PARTS = ("model_type", "patch_size", "temporal_patch_size", "spatial_merge_size")
"""Settings of a model's part for images that decide what its pixels and placeholders are."""
SAME_PROCESSING = (
    *("patch_size", "temporal_patch_size", "merge_size", "size", "min_pixels", "max_pixels"),
    *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
)
"""Settings of an image processor that decide what its pixels are."""


class SentImages:
    """Images of a policy, for requests to its servers.

    The image processor is loaded with the first image, in each process that sends images and was given none.

    Args:
        model: the policy, a directory or a hub name.
        expected: prompts have images, so that a server that takes none is an error when it is connected.
        store: images of this process; other processes load their own.
        kept: see `ImageStore`; not used if `store` is given, which has its own.
    """

    def __init__(
        self, model: str, expected: bool = False, store: ImageStore | None = None, kept: Path | None = None
    ) -> None:
        self.model = model
        self.expected = expected
        self._store = store
        self._kept = kept if store is None else store.kept
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return SentImages, (self.model, self.expected, None, self._kept)

    def store(self, feature: Feature) -> ImageStore:
        """Return the policy's images; call it in a thread.

        Args:
            feature: the image that needs them.

        Raises:
            ImageError: the policy takes no images.
        """
        with self._lock:
            if self._store is None:
                images = load_images(self.model, self._kept)
                if not isinstance(images, ImageStore):
                    raise ImageError(f"image {feature.source}: {images.reason}")
                self._store = images
            return self._store

    def other_model(self, server_model: str) -> str | None:
        """Return why the model of a server cannot take the policy's images, and the remedy.

        Args:
            server_model: the server's name of its model; None is returned unless it is a directory here.
        """
        theirs, own = local_config(server_model), local_config(self.model)
        if not theirs:
            return None
        if (vision := theirs.get("vision_config")) is None:
            return f"serves {server_model}, which reads no images: start it with the policy, {self.model}"
        parts = {name: (vision.get(name), own.get("vision_config", {}).get(name)) for name in SAME_PARTS}
        parts["image_token_id"] = theirs.get("image_token_id"), own.get("image_token_id")
        for name, (got, wanted) in parts.items():
            if own and got != wanted:
                return (
                    f"serves {server_model}, whose images have {name} = {got} where the policy, {self.model}, has "
                    f"{wanted}: start it with the policy"
                )
        return None

    def other_processor(self, server_model: str) -> str | None:
        """Return why the image processor of a server makes other pixels than the policy's, and the remedy.

        Args:
            server_model: the directory of its tokenizer; None is returned unless it is a directory here.
        """
        theirs, own = local_image_processor(server_model), local_image_processor(self.model)
        for name in SAME_PROCESSING:
            if name in theirs and name in own and theirs[name] != own[name]:
                return (
                    f"has the image processor of {server_model}, with {name} = {theirs[name]} where that of the "
                    f"policy, {self.model}, has {own[name]}: start it with the policy"
                )
        return None
