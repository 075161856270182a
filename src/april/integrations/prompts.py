"""Prompts from a framework's requests, dataset or dataloader.

Invariants:
- every prompt that a framework requests is drawn once, in the order requested;
- every row of an epoch is drawn once, in the order of its dataset or dataloader, across restarts too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from april.rollout.prompt_source import PromptReader
from april.rollout.trajectory.prompt import Prompt


class RequestedPrompts(Iterator[Prompt]):
    """A queue of requested prompts, followed by extra prompts whenever the queue is empty.

    Args:
        extra: prompts beyond those requested. The position of `ResumablePrompts` is saved too.

    Attributes:
        queue: prompts requested and not yet drawn.
        requested: number of prompts requested so far.
        extra_drawn: number of extra prompts drawn so far.
    """

    def __init__(self, extra: Iterable[Prompt] = ()) -> None:
        self._extra = PromptReader(extra)
        self.queue: deque[Prompt] = deque()
        self.requested = 0
        self.extra_drawn = 0

    def request(self, prompts: Sequence[Prompt]) -> None:
        self.queue.extend(prompts)
        self.requested += len(prompts)

    def __next__(self) -> Prompt:
        if self.queue:
            return self.queue.popleft()
        prompt = next(self._extra)
        self.extra_drawn += 1
        return prompt

    def state_dict(self) -> dict[str, Any]:
        return {
            "queue": [prompt.to_dict() for prompt in self.queue],
            "requested": self.requested,
            "extra_drawn": self.extra_drawn,
            "extra": self._extra.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue = deque(Prompt.from_dict(saved) for saved in state["queue"])
        self.requested, self.extra_drawn = state["requested"], state["extra_drawn"]
        self._extra.go_to(state["extra"])


class DatasetPrompts(Iterator[Prompt]):
    """Prompts made of a dataset's rows, epoch after epoch without a break.

    Args:
        rows: returns an iterator over the rows of an epoch, given the epoch and the number of its rows to skip.
        encode: makes a prompt of a row.
    """

    def __init__(
        self,
        rows: Callable[[int, int], Iterator[Mapping[str, Any]]],
        encode: Callable[[Mapping[str, Any]], Prompt],
    ) -> None:
        self._read = rows
        self._encode = encode
        self.epoch = 0
        self.position = 0
        """Number of rows of this epoch that were drawn."""
        self._rows: Iterator[Mapping[str, Any]] | None = None

    def __next__(self) -> Prompt:
        if self._rows is None:
            self._rows = self._read(self.epoch, self.position)
        row = next(self._rows, None)
        if row is None:
            self.epoch, self.position = self.epoch + 1, 0
            self._rows = self._read(self.epoch, 0)
            # Raises StopIteration for an empty dataset, which would otherwise loop for ever.
            row = next(self._rows)
        self.position += 1
        return self._encode(row)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position, self._rows = state["epoch"], state["position"], None


class DataloaderRows(Iterator[Any]):
    """Rows of a dataloader's batches, epoch after epoch without a break.

    Args:
        dataloader: has `state_dict` and `load_state_dict`; its length is the number of batches of an epoch.
        rows_of: splits a batch into rows; by default a batch is a list of rows.
        sets_epoch: call `set_epoch` of the dataloader's sampler at the start of an epoch.

    Raises:
        StopIteration: the dataloader has no rows at all.

    Attributes:
        drawn: number of rows drawn since the start of this process.
    """

    def __init__(
        self, dataloader: Any, rows_of: Callable[[Any], Iterable[Any]] = iter, sets_epoch: bool = True
    ) -> None:
        self.dataloader = dataloader
        self._sets_epoch = sets_epoch
        self.epoch = 0
        self.drawn = 0
        self._rows_of = rows_of
        self._rows: deque[Any] = deque()
        """Rows of the latest batch that are not drawn yet."""
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.dataloader)

    def __next__(self) -> Any:
        self._fill()
        self.drawn += 1
        return self._rows.popleft()

    def peek(self) -> Any:
        """Return the next row without drawing it."""
        self._fill()
        return self._rows[0]

    def _fill(self) -> None:
        ended = 0  # a restored dataloader may be at the end of an epoch, so the first end proves nothing
        while not self._rows:
            if self._batches is None:
                sampler: Any = getattr(self.dataloader, "sampler", None)
                if self._sets_epoch and hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(self.epoch)
                self._batches = iter(self.dataloader)
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                self.epoch += 1
                ended += 1
                if ended == 3:
                    raise StopIteration
            else:
                self._rows.extend(self._rows_of(batch))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "rows": list(self._rows), "dataloader": self.dataloader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dataloader.load_state_dict(state["dataloader"])
        self.reopen()
        self.epoch, self._rows = state["epoch"], deque(state["rows"])

    def reopen(self) -> None:
        """Continue at the dataloader's own position, which its framework has just restored."""
        self._rows.clear()
        self._batches = None
