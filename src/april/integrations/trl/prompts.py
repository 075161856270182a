"""Rows of TRL's datasets as april's prompts; each keeps the whole row as its metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from trl.data_utils import prepare_multimodal_messages

from april.images.store import ImageStore, NoImages
from april.integrations.prompts import DatasetPrompts
from april.integrations.trl.stored_images import StoredImages, images_of, path_of
from april.rollout.trajectory.prompt import Prompt

Row = Mapping[str, Any]


def encoder(tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> Callable[[Row], Prompt]:
    """Return a function that tokenizes a row's prompt as TRL does."""

    def encode(row: Row) -> Prompt:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            token_ids = tokenizer(text=prompt)["input_ids"]
        else:
            token_ids = tokenizer.apply_chat_template(
                conversation=prompt,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **options,
            )["input_ids"]
        return Prompt(tuple(token_ids), metadata=dict(row))

    return encode


def image_encoder(
    processor: Any,
    template: str | None,
    options: Mapping[str, Any],
    stored: StoredImages,
    policy_images: ImageStore | NoImages,
) -> Callable[[Row], Prompt]:
    """Return a function that encodes a row whose prompt may have images.

    Args:
        processor: tokenizer, image processor and chat template of the policy.
        stored: keeps the images of rows as files.
        policy_images: expands placeholders, or the reason why the policy takes no images.
    """
    tokenizer = processor.tokenizer

    def tokenized(text: str) -> list[int]:
        bos = tokenizer.bos_token
        ids: list[int] = tokenizer(text=text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]
        return ids

    def encode(row: Row) -> Prompt:
        """Raises:
        ValueError: images and places for them differ in number, or the policy takes no images.
        """
        row = stored.store(row)
        prompt, sources = row["prompt"], []
        if isinstance(prompt, str):
            token_ids = tokenizer(text=prompt)["input_ids"]
        else:
            messages = prepare_multimodal_messages(prompt, images=_column_images(row))
            sources = [str(path_of(image)) for image in images_of(messages)]
            text = processor.apply_chat_template(
                conversation=messages, chat_template=template, add_generation_prompt=True, tokenize=False, **options
            )
            token_ids = tokenized(text)
        # Without images too, because TRL's forward pass takes placeholders in the text for parts of an image.
        if not sources and isinstance(policy_images, NoImages):
            return Prompt(tuple(token_ids), metadata=row)
        try:
            token_ids, features = policy_images.expand(token_ids, sources)
        except ValueError as error:
            raise ValueError(f"a prompt of the data set: {error}") from None
        return Prompt(tuple(token_ids), metadata=row, features=features)

    return encode


def _column_images(row: Row) -> list[Any]:
    """Return the images in the columns that TRL reads."""
    if "images" in row:
        return list(row["images"] or ())
    return [] if row.get("image") is None else [row["image"]]


def dataset_prompts(dataset: Any, encode: Callable[[Row], Prompt], seed: int) -> DatasetPrompts:
    """Return further prompts, which TRL's dataloader does not request: they raise the groups in flight from N to N'.

    The rows of a `Dataset` are shuffled. An `IterableDataset` can only be read from its beginning: its rows keep their
    order, although TRL shuffles them through a buffer of its own.
    """

    def shuffled(epoch: int, skip: int) -> Iterator[Row]:
        # The seed contains the epoch, so that a resumed run finds the same order without replaying earlier epochs.
        order = np.random.default_rng((seed, epoch)).permutation(len(dataset))
        return (dataset[int(index)] for index in order[skip:])

    def streamed(epoch: int, skip: int) -> Iterator[Row]:
        dataset.set_epoch(epoch)
        return iter(dataset.skip(skip) if skip else dataset)

    return DatasetPrompts(shuffled if isinstance(dataset, Dataset) else streamed, encode)
