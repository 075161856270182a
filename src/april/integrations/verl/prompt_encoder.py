"""Prompts of verl's rows.

verl's dataset puts images into the messages of a row, and its processor makes token ids that hold all placeholders of
an image. verl's vLLM replica reduces them to one for each image, since vLLM repeats them itself; it does so only for
the image processor of the Qwen-VL models. The same holds for a request with a partial response.

Invariants:
- verl's own code makes the token ids and the images of a prompt, as in its agent loop of one turn;
- threads read and process images, a step's rows ahead; the event loop waits only for rows that are not ready by then;
- ranges of placeholders in prompt and responses stand for the first images of the row, in order, also in agent loops:
  which images a request needs follows from its tokens;
- pixels are in verl's rows: april's state has the place of an image and its hash, or for agent loops its hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.tokenizer import get_processor_token_id
from verl.workers.rollout.utils import get_vision_placeholder_token_ids

from april.integrations.rules.verl_rules import IMAGES
from april.integrations.verl.images import IMAGE_PARTS, RowImages, media_of, sources_of
from april.rollout.trajectory.features import ranges_of
from april.rollout.trajectory.prompt import Prompt

COLLAPSED = "Qwen2VLImageProcessor"
"""Part of the names of image processors whose placeholders verl's vLLM replica reduces to one for each image."""

IMAGE_HASHES = "images"
"""Key in the metadata of prompts whose token ids agent loops make."""

THREADS = 4
"""Rows that are encoded at a time."""


class PromptEncoder:
    """Makes prompts of rows, and keeps the images of prompts in flight.

    Args:
        worker: verl's agent-loop worker, which holds the tokenizer and the processor.
        agent_loops: agent loops make the token ids of prompts.

    Attributes:
        settings: arguments of the processor, from verl's configuration.
        undrawn: placeholders, which a policy may not draw: verl's replicas and trainer take each for an image.
    """

    def __init__(self, worker: Any, agent_loops: bool = False) -> None:
        config, self._processor = worker.config, worker.processor
        self._agent_loops = agent_loops
        self._rollout = worker.rollout_config
        self._agent_loop = SingleTurnAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=None,
            tokenizer=worker.tokenizer,
            processor=worker.processor,
            dataset_cls=worker.dataset_cls,
            data_config=DictConfigWrap(config.data),
            hf_model_type=worker.hf_model_type,
        )
        self._threads = ThreadPoolExecutor(THREADS, "encode")
        self._images: dict[str, RowImages] = {}
        """By the id of the prompt, for those in flight."""
        self.settings: dict[str, Any] = self._agent_loop._get_mm_processor_kwargs()
        self.undrawn: frozenset[int] = frozenset()
        self._placeholder: int | None = None
        if self._processor is not None:
            self.undrawn = frozenset(get_vision_placeholder_token_ids(self._processor))
            self._placeholder = get_processor_token_id(self._processor, "image")

    @property
    def ahead(self) -> int:
        """Rows that are encoded before their prompts are needed: a step's, if rows may have images."""
        return 0 if self._processor is None else self._agent_loop.data_config.train_batch_size

    def start(self, row: Mapping[str, Any]) -> Future[Prompt]:
        """Have a thread make the prompt of a row; see `prompt`."""
        return self._threads.submit(self.prompt, row)

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a row.

        Raises:
            ValueError: its images cannot be read, do not fit its text, or are not supported.
        """
        messages, uid = list(row["raw_prompt"]), row["uid"]
        if self._processor is None or not media_of(messages):
            return Prompt((), uid, metadata={"uid": uid}) if self._agent_loops else self._of_text(messages, uid)
        self._require_support(messages, uid)
        images = self._read(messages, uid)
        if self._agent_loops:
            prompt = Prompt((), uid, metadata={"uid": uid, IMAGE_HASHES: list(images.digests)})
        else:
            prompt = self._with_images(messages, images, uid)
        self._images[uid] = images
        return prompt

    def _of_text(self, messages: list[Any], uid: str) -> Prompt:
        token_ids = tuple(self._agent_loop.continuous_token_builder.build_initial_tokens(messages))
        if found := self.undrawn.intersection(token_ids):
            raise ValueError(
                f"data: the text of prompt {uid} has token {min(found)}, the placeholder of an image or a video: leave "
                "it out"
            )
        # verl keeps the end of a longer prompt; data.filter_overlong_prompts drops long prompts instead.
        return Prompt(token_ids[-self._rollout.prompt_length :], uid)

    def _with_images(self, messages: list[Any], images: RowImages, uid: str) -> Prompt:
        limit = self._rollout.prompt_length
        try:
            token_ids = tuple(self._agent_loop.continuous_token_builder.build_initial_tokens(messages, images=images))
        except Exception as error:  # of transformers' processors and chat templates
            raise ValueError(f"data: prompt {uid} with {len(images)} images: {_line(error)}") from error
        if len(token_ids) > limit:
            raise ValueError(
                f"data.max_prompt_length = {limit}: prompt {uid} has {len(token_ids)} tokens, and one with images "
                "cannot be cut: raise it, or set data.filter_overlong_prompts=true"
            )
        return Prompt(token_ids, uid, features=images.features(token_ids, self._placeholder, messages, uid))

    def restore(self, prompts: Sequence[Prompt], rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Read the images of saved prompts again.

        Args:
            rows: by the id of their prompt.

        Raises:
            ValueError: an image cannot be read, or has changed.
        """
        saved = {prompt.id: hashes for prompt in prompts if (hashes := _hashes_of(prompt))}
        read = self._threads.map(lambda uid: self._read(list(rows[uid]["raw_prompt"]), uid), saved)
        for (uid, hashes), images in zip(saved.items(), read, strict=True):
            sources = sources_of(uid, rows[uid]["raw_prompt"])
            for source, before, now in zip(sources, hashes, images.digests, strict=True):
                if before != now:
                    raise ValueError(
                        f"data: image {source} has changed since its prompt was encoded: put the former image back, or "
                        "start a new run"
                    )
            self._images[uid] = images

    def forget(self, uid: str) -> None:
        """Drop the images of a prompt that is no longer in flight."""
        self._images.pop(uid, None)

    def images(self, uid: str, token_ids: Sequence[int]) -> Sequence[Any]:
        """Return the images that the placeholders among the tokens of a prompt in flight, or of its samples, stand for:
        the row's `RowImages`, or a list of the first of them."""
        images = self._images.get(uid)
        if images is None:
            return ()
        count = self.places(token_ids)
        return images if count == len(images) else images[:count]

    def places(self, token_ids: Sequence[int]) -> int:
        """Return the number of images that tokens have placeholders for."""
        return 0 if self._placeholder is None else sum(1 for _ in ranges_of(token_ids, self._placeholder))

    def hashes(self, uid: str) -> tuple[str, ...]:
        """Return the hashes of a row's images; empty without images."""
        images = self._images.get(uid)
        return () if images is None else images.digests

    def _require_support(self, messages: Sequence[Mapping[str, Any]], uid: str) -> None:
        processor = type(getattr(self._processor, "image_processor", None)).__name__
        others = [kind for kind in media_of(messages) if kind not in IMAGE_PARTS]
        if others:
            raise IMAGES.error(f"{others[0]} in prompt {uid}")
        if self._rollout.name != "vllm":
            raise IMAGES.error(f"image in prompt {uid}, with actor_rollout_ref.rollout.name={self._rollout.name}")
        if COLLAPSED not in processor:
            raise IMAGES.error(f"image in prompt {uid}, with {processor}")

    def _read(self, messages: list[Any], uid: str) -> RowImages:
        try:
            found = asyncio.run(self._agent_loop.process_multi_modal_info(messages))
            return RowImages(found.get("images") or ())
        except Exception as error:  # of Pillow, the file system and verl's dataset
            sources = ", ".join(sources_of(uid, messages))
            raise ValueError(f"data: image {sources} cannot be read: {_line(error)}") from error


def _hashes_of(prompt: Prompt) -> Sequence[str]:
    """Return the hashes of the images of a prompt."""
    of_loop: Sequence[str] = prompt.metadata.get(IMAGE_HASHES, ())
    return of_loop or [feature.digest for feature in prompt.features]


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
