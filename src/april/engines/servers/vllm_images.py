"""Images in requests to vLLM's servers: the prompt's ids with all placeholders, and the pixels.

The server's own image processor has no part in it: the server computes embeddings from the pixels that april's trainer
computes them from, and places these embeddings at the ranges that the prompt was encoded with. A sample that is resumed
sends its prompt, its response so far and the same images: the field `features` of `/inference/v1/generate` has hashes,
ranges, and msgpack of each image's tensors in base64.

Invariant: vLLM's hash of an image names the weights too, so that no embedding of other weights is found in the server's
caches.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.engines.servers.sent_images import SentImages
from april.images.store import Pixels
from april.rollout.trajectory.features import Feature

RAW_TENSOR = 3
"""vLLM's msgpack extension for the bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class _Range:
    offset: int
    length: int


def vllm_features(images: SentImages, features: Sequence[Feature], salt: str) -> dict[str, Any]:
    """Return the field `features` of a request to vLLM; call it in a thread.

    Args:
        salt: names the server's weights.

    Raises:
        ImageError: an image is missing or has changed, or the policy takes no images.
    """
    store = images.store(features[0])
    return {
        "mm_hashes": {"image": [f"{salt}-{feature.digest}" for feature in features]},
        "mm_placeholders": {"image": [_Range(feature.offset, feature.length) for feature in features]},
        "kwargs_data": {"image": [_vllm_tensors(store.pixels(feature)) for feature in features]},
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
