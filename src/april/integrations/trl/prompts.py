"""Rows of TRL's datasets as april's prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from datasets import Dataset

from april.integrations.prompts import DatasetPrompts
from april.rollout.trajectory.prompt import Prompt

Row = Mapping[str, Any]


def encoder(tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> Callable[[Row], Prompt]:
    """Return a function that tokenizes a row's prompt as TRL does, and keeps the whole row as the prompt's metadata."""

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


def dataset_prompts(dataset: Any, encode: Callable[[Row], Prompt], seed: int) -> DatasetPrompts:
    """Prompts beyond those that TRL's dataloader requests, which raise the groups in flight from N to N'.

    The rows of a `Dataset` are shuffled; those of an `IterableDataset`, which can only be read from its beginning, keep
    its order, although TRL shuffles them through a buffer of its own.
    """

    def shuffled(epoch: int, skip: int) -> Iterator[Row]:
        # The seed contains the epoch, so that a resumed run finds the same order without replaying earlier epochs.
        order = np.random.default_rng((seed, epoch)).permutation(len(dataset))
        return (dataset[int(index)] for index in order[skip:])

    def streamed(epoch: int, skip: int) -> Iterator[Row]:
        dataset.set_epoch(epoch)
        return iter(dataset.skip(skip) if skip else dataset)

    return DatasetPrompts(shuffled if isinstance(dataset, Dataset) else streamed, encode)
