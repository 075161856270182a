"""Images of slime's prompts.

slime's data set holds its images in memory. The images of a prompt are processed once, by slime's own function, when
the prompt is drawn: the result is the ids with all placeholders, and the tensors for slime's trainer. Requests have the
form of `april.engines.servers.sglang_images`, with the pixels that slime sends.

Invariants:
- placeholders are expanded once on each side, and a server computes with the tokens of the sample: it reports their
  number for each request, and the ids of the first sample with images that it resumes in a rollout;
- a sample that is resumed is sent as the same images, its prompt, and its response so far;
- checkpoints hold the SHA-256 of an image's pixels and never the pixels. Images of a checkpoint are found by it in the
  data set;
- images are held for the prompts that are unfinished or in the latest batch.
"""

from __future__ import annotations

import hashlib
import logging
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from slime.rollout.sglang_rollout import _prepare_prompt_ids
from slime.utils.processing_utils import load_processor
from slime.utils.types import Sample as SlimeSample

from april.engines.servers.client import RequestError
from april.engines.servers.sglang_images import png_address, with_one_placeholder_each
from april.integrations.stop_tokens import TRUSTED
from april.rollout.trajectory.features import Feature, ranges_of
from april.rollout.trajectory.prompt import Prompt

log = logging.getLogger(__name__)

Features = tuple[Feature, ...]

FIELDS = ("multimodal_inputs", "multimodal_train_inputs")
"""Fields of slime's samples that hold images and tensors, which are no part of a checkpoint."""
CACHE_SIZE = "SGLANG_VLM_CACHE_SIZE_MB"
"""Environment variable with the size of SGLang's cache of embeddings, which nothing empties. Its keys are hashes of the
processed pixels in 0.5.15, so that the name of the weights that images carry has no effect there."""
REFUSED = 400
"""HTTP status of errors that another request would meet again."""


class Meta(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None


class Event(msgspec.Struct, gc=False):
    """What an SGLang event contains of the input of its request, with all placeholders."""

    meta_info: Meta
    prompt_token_ids: list[int] | None = None


decode = msgspec.json.Decoder(Event).decode


@dataclass
class HeldImages:
    """The images of one prompt.

    Args:
        inputs: slime's `multimodal_inputs`.
        train_inputs: slime's `multimodal_train_inputs`.
        prompt_length: tokens of the prompt, with all placeholders.
    """

    inputs: dict[str, Any]
    train_inputs: dict[str, Any] | None
    prompt_length: int

    _sent: tuple[str, list[str]] | None = field(default=None, init=False)

    def sent(self, salt: str) -> list[str]:
        """Return the images as requests contain them, as slime's function does, with a name of the weights."""
        if self._sent is None or self._sent[0] != salt:
            self._sent = salt, [png_address(pixels_of(image), salt) for image in self.inputs["images"]]
        return self._sent[1]


class DatasetImages:
    """Images of the prompts that were drawn from slime's data source.

    Args:
        args: slime's arguments.
        tokenizer: slime's.
        data_source: slime's; images of a checkpoint are looked for in its `dataset`.
    """

    def __init__(self, args: Namespace, tokenizer: Any, data_source: Any) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._data_source = data_source
        self._held: dict[Features, HeldImages] = {}

    @cached_property
    def _processor(self) -> Any:
        processor = load_processor(self._args.hf_checkpoint, trust_remote_code=TRUSTED)
        if getattr(processor, "image_token_id", None) is None:
            raise ValueError(
                f"--hf-checkpoint {self._args.hf_checkpoint}: it has no processor with an image_token_id, and prompts "
                "have images: use a model that reads images, or leave them out of the data"
            )
        return processor

    @cached_property
    def _reserved(self) -> frozenset[int]:
        ids = (getattr(self._processor, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
        return frozenset(id for id in ids if id is not None)

    @cached_property
    def _begin(self) -> int | None:
        begin: int | None = getattr(self._processor, "vision_start_token_id", None)
        return begin

    @cached_property
    def expected(self) -> bool:
        """Prompts may have images."""
        found = ((sample.multimodal_inputs or {}).get("images") for sample in self._samples())
        return self._args.multimodal_keys is not None or any(found)

    def warn_of_cached_embeddings(self) -> None:
        """Warn if slime's servers keep embeddings of images across weight updates.

        The servers have the environment variables that slime's Ray job gives to this process.
        """
        if self.expected and os.environ.get(CACHE_SIZE) != "0":
            log.warning(
                "SGLang keeps embeddings of images across weight updates: if slime trains the vision tower, set %s to "
                "0 in the env_vars of --runtime-env-json (docs/integrations/slime.md, Images)",
                CACHE_SIZE,
            )

    def _samples(self) -> Sequence[SlimeSample]:
        """Return the samples of slime's data set, of which other data sources may have none."""
        return getattr(getattr(self._data_source, "dataset", None), "origin_samples", ())

    def encode(self, sample: SlimeSample) -> tuple[list[int], Features]:
        """Return the ids of a new prompt with all placeholders, and its images, which are held from here on.

        Raises:
            ValueError: the prompt has more or fewer places for images than images.
        """
        images, places = images_of(sample), sample.prompt.count(self._processor.image_token)
        if places != len(images):  # processors fail in ways of their own
            raise ValueError(
                f"prompt {sample.index}: {places} places for {len(images)} images: the chat template must write "
                f"{self._processor.image_token} once for each image, and the text none of its own"
            )
        ids, held = self._processed(sample)
        ranges = list(ranges_of(ids, self._processor.image_token_id))
        if len(ranges) != len(images):
            raise ValueError(
                f"prompt {sample.index}: {len(ranges)} ranges of placeholders for {len(images)} images: the chat "
                "template must write a token between two images"
            )
        features = tuple(
            Feature(f"{number} of prompt {sample.index} of {self._args.prompt_data}", digest_of(image), *place)
            for number, (image, place) in enumerate(zip(images, ranges, strict=True), 1)
        )
        self._held[features] = held
        return ids, features

    def _processed(self, sample: SlimeSample) -> tuple[list[int], HeldImages]:
        # Without the tokens of an earlier response, slime's function processes the images.
        fresh = SlimeSample(prompt=sample.prompt, multimodal_inputs=dict(sample.multimodal_inputs or {}))
        ids = _prepare_prompt_ids(fresh, self._tokenizer, self._processor)
        return list(ids), HeldImages(fresh.multimodal_inputs, fresh.multimodal_train_inputs, len(ids))

    def attach(self, prompt: Prompt, *samples: SlimeSample) -> None:
        """Give slime's samples of a prompt its images and tensors, as slime's generation does."""
        held = self._held[prompt.features]
        for sample in samples:
            sample.multimodal_inputs = {**held.inputs, "images": list(held.inputs["images"])}
            sample.multimodal_train_inputs = None if held.train_inputs is None else dict(held.train_inputs)

    def keep(self, prompts: Iterable[Prompt]) -> None:
        """Drop the images of all other prompts."""
        kept = {prompt.features for prompt in prompts}
        self._held = {features: held for features, held in self._held.items() if features in kept}

    def restore(self, prompts: Iterable[Prompt]) -> None:
        """Find the images of a checkpoint's prompts in slime's data set, and process them again.

        Raises:
            ValueError: an image is missing or has changed, or the model's processor has.
        """
        lost = {prompt.features: prompt for prompt in prompts if prompt.features and prompt.features not in self._held}
        if not lost:
            return
        known: dict[Any, list[tuple[list[str], SlimeSample]]] = defaultdict(list)
        texts = {text_of(prompt) for prompt in lost.values()}
        for sample in self._samples():
            if sample.prompt in texts:
                known[sample.prompt].append(([digest_of(image) for image in images_of(sample)], sample))
        for features, prompt in lost.items():
            candidates = known[text_of(prompt)]
            wanted = [feature.digest for feature in features]
            sample = next((sample for digests, sample in candidates if digests == wanted), None)
            if sample is None:
                there = {digest for digests, _ in candidates for digest in digests}
                image = next((feature for feature in features if feature.digest not in there), features[0])
                raise ValueError(
                    f"image {image.source}: it is missing or has changed since slime's checkpoint: restore the data, "
                    "or start a new run"
                )
            ids, self._held[features] = self._processed(sample)
            if tuple(ids) != prompt.token_ids:
                raise ValueError(
                    f"image {features[0].source}: its prompt has other tokens than in slime's checkpoint: the "
                    "processor of --hf-checkpoint has changed"
                )

    def unsendable(self, features: Features, token_ids: Sequence[int]) -> str | None:
        """Return why SGLang would not take a sample's tokens with images; None if it does.

        SGLang and slime's trainer take each placeholder for a part of an image, also one that the policy has drawn.
        """
        behind = features[-1].end if features else len(token_ids)
        drawn = next((token for token in token_ids[behind:] if token in self._reserved), None)
        return None if drawn is None else f"the policy has drawn token {drawn}, a placeholder of images or videos"

    def has_response(self, features: Features, token_ids: Sequence[int]) -> bool:
        """Return whether a sample's tokens are more than its prompt with images."""
        return len(token_ids) > self._held[features].prompt_length

    def request(self, features: Features, token_ids: Sequence[int], salt: str) -> dict[str, Any]:
        """Return the fields of a request that its images decide; call it in a thread.

        Args:
            token_ids: prompt and response so far, with all placeholders.
            salt: names the server's weights.
        """
        return {
            "input_ids": with_one_placeholder_each(token_ids, features, self._reserved, self._begin),
            "image_data": self._held[features].sent(salt),
        }


def check_input(event: bytes, token_ids: Sequence[int], ids_asked: bool) -> None:
    """Check that a server computes with a sample's tokens.

    Args:
        event: the first of a request's.
        token_ids: prompt with all placeholders, and response so far.
        ids_asked: the event contains the ids, and not only their number.

    Raises:
        RequestError: it computes with other tokens, or does not report them.
    """
    decoded = decode(event)
    theirs, count = decoded.prompt_token_ids, decoded.meta_info.prompt_tokens
    if ids_asked and theirs is None:
        raise RequestError("it does not report the ids of prompts with images: use SGLang 0.5.15 or later", REFUSED)
    if count != len(token_ids) or (ids_asked and theirs != list(token_ids)):
        raise RequestError(
            f"it computes with other tokens ({count}) than those of a prompt with images and its response so far "
            f"({len(token_ids)}): its image processor is not that of --hf-checkpoint, or it turns ids into text "
            "and back (SGLANG_MM_AVOID_RETOKENIZE is off, or a newer SGLang lacks --mm-preprocess-cache-size-mb)",
            REFUSED,
        )


def images_of(sample: SlimeSample) -> list[Any]:
    """Return the images of slime's sample, as Pillow's.

    Raises:
        ValueError: it has other media.
    """
    inputs = sample.multimodal_inputs or {}
    for kind, value in inputs.items():
        if kind != "images" and value is not None:
            raise ValueError(f"prompt {sample.index} has {kind}, which april does not send: leave them out of the data")
    return list(inputs.get("images") or ())


def pixels_of(image: Any) -> NDArray[np.uint8]:
    """Return the pixels that slime sends of a Pillow image; shape [height, width, 3]."""
    return np.asarray(image.convert("RGB"))


def digest_of(image: Any) -> str:
    """Return the SHA-256 of an image's size and pixels as they are sent."""
    pixels = pixels_of(image)
    return hashlib.sha256(f"{pixels.shape[1]} x {pixels.shape[0]} ".encode() + pixels.tobytes()).hexdigest()


def text_of(prompt: Prompt) -> Any:
    """Return the text of slime's prompt."""
    return prompt.metadata["slime"][0]["prompt"]
