"""TRL's rows as april's prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray

from april.rollout.trajectory import Prompt


class ShuffledRows(Iterator[Prompt]):
    """A dataset's rows as prompts, epoch after epoch, in an order that follows from (seed, epoch).

    These are the prompts that bring what is under way from N to N'; the dataloader asks for its own.
    """

    def __init__(self, dataset: Any, encode: Callable[[Mapping[str, Any]], Prompt], seed: int) -> None:
        self.dataset = dataset
        self.encode = encode
        self.seed = seed
        self.drawn = 0
        self._epoch = 0
        self._order = self._permutation()

    def _permutation(self) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, self._epoch)).permutation(len(self.dataset))

    def __next__(self) -> Prompt:
        epoch, position = divmod(self.drawn, len(self.dataset))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._permutation()
        self.drawn += 1
        return self.encode(self.dataset[int(self._order[position])])

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.drawn = state["drawn"]


class StreamedRows(Iterator[Prompt]):
    """The rows of a dataset that can only be read from its beginning, epoch after epoch, in the order it gives.

    TRL shuffles a stream through a buffer of its own; these rows, which bring what is under way from N to N', are not.
    """

    def __init__(self, dataset: IterableDataset, encode: Callable[[Mapping[str, Any]], Prompt]) -> None:
        self.dataset = dataset
        self.encode = encode
        self.drawn = 0
        """Rows of this epoch."""
        self.epoch = 0
        self._rows: Iterator[Mapping[str, Any]] | None = None

    def _read(self) -> Iterator[Mapping[str, Any]]:
        self.dataset.set_epoch(self.epoch)
        return iter(self.dataset.skip(self.drawn) if self.drawn else self.dataset)

    def __next__(self) -> Prompt:
        if self._rows is None:
            self._rows = self._read()
        row = next(self._rows, None)
        if row is None:
            self.epoch, self.drawn = self.epoch + 1, 0
            self._rows = self._read()
            row = next(self._rows)
        self.drawn += 1
        return self.encode(row)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.drawn, self._rows = state["epoch"], state["drawn"], None


def extra_rows(dataset: Any, encode: Callable[[Mapping[str, Any]], Prompt], seed: int) -> Iterator[Prompt]:
    """Rows beyond those that the dataloader asks for."""
    return ShuffledRows(dataset, encode, seed) if isinstance(dataset, Dataset) else StreamedRows(dataset, encode)


def encoder(tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Prompt]:
    """How TRL tokenizes the prompt of a row, with the whole row as the prompt's metadata."""

    def encode(row: Mapping[str, Any]) -> Prompt:
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
