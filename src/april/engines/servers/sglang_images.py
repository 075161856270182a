"""Images in requests to SGLang's server: the prompt's ids with one placeholder for each image, and resized pictures.

The server takes no pixels over HTTP. Its own image processor makes them, but of pictures that need no resizing, so
that it only scales colours, as the trainer's does. The server repeats each placeholder as often as the image has
embeddings, and takes each id that stands for an image or a video, wherever it is, for a further one. A sample that is
resumed sends its prompt in the same form, its response so far and the same pictures.

Invariants:
- the server expands a prompt to the ids that april has, or the run ends: events state their number;
- the bytes of a picture name the weights: nothing empties the server's cache of embeddings when weights change
  (0.5.23), and its keys are hashes of these bytes.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.engines.servers.client import RequestError
from april.engines.servers.local_model import local_config
from april.engines.servers.sent_images import SentImages
from april.rollout.trajectory.features import Feature, collapsed

KEEPS_IDS = "--mm-preprocess-cache-size-mb"
"""Option with which a server keeps the ids of prompts with images; without it, most models' ids go through text."""
CACHE_MB = 256
"""Megabytes of pixels that april lets its servers keep."""
ALWAYS_KEEP_IDS = ("qwen3_vl", "qwen3_vl_moe")
"""Types of models whose ids are kept without the option."""
ONLY_PATCH = {"qwen2_5_vl": 14}
"""Pixels of a patch, for types of models whose patches of other sizes the server takes for embeddings (0.5.23)."""


def unfit_for_images(images: SentImages, model: dict[str, Any], server: dict[str, Any]) -> str | None:
    """Return why a server cannot take prompts with images, and the remedy; None if it can.

    Args:
        model: answer to `/model_info`.
        server: answer to `/server_info`.
    """
    path, kind = model["model_path"], model.get("model_type")
    if reason := images.other_model(path) or images.other_processor(model.get("tokenizer_path") or path):
        return reason
    if not model.get("has_image_understanding"):
        return f"serves {path}, which reads no images: start it with the policy, {images.model}"
    patch = local_config(images.model).get("vision_config", {}).get("patch_size")
    if patch is not None and kind in ONLY_PATCH and patch != ONLY_PATCH[kind]:
        return f"computes {kind} with patch_size = {ONLY_PATCH[kind]} alone, and the policy has {patch}: use vLLM"
    if (server.get("mm_process_config") or {}).get("image"):
        return "changes the image processor: start it without the images of --mm-process-config"
    if kind not in ALWAYS_KEEP_IDS and not server.get("mm_preprocess_cache_size_mb"):
        return f"would decode and encode prompts and responses with images: start it with {KEEPS_IDS} {CACHE_MB}"
    return None


def sglang_fields(
    images: SentImages, token_ids: Sequence[int], features: Sequence[Feature], salt: str
) -> dict[str, Any]:
    """Return the fields of a request that its images decide; call it in a thread.

    Args:
        token_ids: prompt and response so far, with all placeholders.
        salt: names the server's weights.

    Raises:
        ImageError: an image is missing or has changed, or the policy takes no images.
        RequestError: see `with_one_placeholder_each`.
    """
    store = images.store(features[0])
    return {
        "input_ids": with_one_placeholder_each(token_ids, features, store.media, store.begin),
        "image_data": [png_address(store.picture(feature), salt) for feature in features],
    }


def with_one_placeholder_each(
    token_ids: Sequence[int], features: Sequence[Feature], media: Set[int], begin: int | None
) -> list[int]:
    """Return the ids of a request, whose placeholders the server repeats.

    Args:
        token_ids: prompt and response so far, with all placeholders.
        media: ids that stand for images and videos.
        begin: id behind which an image begins, if there is one.

    Raises:
        RequestError: an id outside of the images stands for an image or a video, or the last id is `begin`: the server
            (0.5.23) reads the id behind each `begin`, and breaks the request off where there is none.
    """
    if token_ids[-1] == begin:
        raise RequestError(f"token {begin} is the last one: SGLang would look for an image behind it")
    ids = collapsed(token_ids, features)
    drawn = Counter(token for token in ids if token in media) - Counter(token_ids[each.offset] for each in features)
    if drawn:
        raise RequestError(f"token {min(drawn)}, outside of the images: SGLang would take it for a further one")
    return ids


def png_address(picture: NDArray[np.uint8], salt: str) -> str:
    """Return a picture as the address of a PNG image, whose bytes name the server's weights by `salt`."""
    from PIL import Image, PngImagePlugin

    weights = PngImagePlugin.PngInfo()
    weights.add_text("weights", salt)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=1, pnginfo=weights)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
