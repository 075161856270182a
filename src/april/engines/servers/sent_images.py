"""Images in requests to vLLM's servers: the prompt's ids with all placeholders, and the pixels.

The server's own image processor has no part in it: the server computes embeddings from the pixels that april's trainer
computes them from, and places these embeddings at the ranges that the prompt was encoded with. A sample that is resumed
sends its prompt, its response so far and the same images: the field `features` of `/inference/v1/generate` has hashes,
ranges, and msgpack of each image's tensors in base64.

Invariants:
- a range has as many placeholders as its image has embeddings: a server gets no image that does not fit;
- vLLM's hash of an image names the weights too: no embedding of other weights is found in the server's caches.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.engines.servers.local_model import local_config
from april.images.source import ImageError
from april.images.store import ImageStore, Pixels
from april.images.support import load_images
from april.rollout.trajectory.features import Feature

RAW_TENSOR = 3
"""vLLM's msgpack extension for the bytes of a tensor."""
SAME_PARTS = ("model_type", "patch_size", "temporal_patch_size", "spatial_merge_size")
"""Settings of a model's part for images that decide what its pixels and placeholders are."""


class SentImages:
    """Images of a policy, for requests to its servers.

    The image processor is loaded with the first image, in each process that sends images and was given none.

    Args:
        model: the policy, a directory or a hub name.
        expected: prompts have images, so that a server that takes none is an error when it is connected.
        store: images of this process; other processes load their own.
    """

    def __init__(self, model: str, expected: bool = False, store: ImageStore | None = None) -> None:
        self.model = model
        self.expected = expected
        self._store = store
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return SentImages, (self.model, self.expected)

    def pixels(self, feature: Feature) -> Pixels:
        """Return the pixels of a prompt's image; call it in a thread.

        Raises:
            ImageError: it is missing or has changed, or the policy takes no images.
        """
        with self._lock:
            if self._store is None:
                images = load_images(self.model)
                if not isinstance(images, ImageStore):
                    raise ImageError(f"image {feature.source}: {images.reason}")
                self._store = images
        return self._store.pixels(feature)

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


@dataclass(frozen=True, slots=True)
class _Range:
    offset: int
    length: int


def vllm_features(images: SentImages, features: Sequence[Feature], salt: str) -> dict[str, Any]:
    """Return the field `features` of a request to vLLM; call it in a thread.

    Args:
        salt: names the server's weights.

    Raises:
        ImageError: an image is missing or has changed.
    """
    return {
        "mm_hashes": {"image": [f"{salt}-{feature.digest}" for feature in features]},
        "mm_placeholders": {"image": [_Range(feature.offset, feature.length) for feature in features]},
        "kwargs_data": {"image": [_vllm_tensors(images.pixels(feature)) for feature in features]},
    }


def _vllm_tensors(pixels: Pixels) -> str:
    """Return the tensors of an image as vLLM's `decode_mm_kwargs_item` reads them."""
    rows = {"slices": [[0, len(pixels.patches), None]], "dim": 0, "keep_on_cpu": False}
    tensors = {
        "pixel_values": {"data": _vllm_tensor(pixels.patches), "field": ["flat", rows]},
        "image_grid_thw": {
            "data": _vllm_tensor(np.array(pixels.grid, np.int64)),
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    return base64.b64encode(msgspec.msgpack.encode(tensors)).decode()


def _vllm_tensor(values: NDArray[Any]) -> list[Any]:
    return [str(values.dtype), list(values.shape), msgspec.msgpack.Ext(RAW_TENSOR, values.tobytes())]
