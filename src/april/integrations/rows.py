"""A framework's dataloader, read row by row.

Invariant: every row of an epoch is given out once, in the dataloader's order, over restarts as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any


class Rows(Iterator[Any]):
    """Rows, epoch after epoch without a break.

    Args:
        dataloader: of batches of rows; with `state_dict` and `load_state_dict`.
    """

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader
        self.epoch = 0
        self._rows: deque[Any] = deque()
        """Of the batch that the dataloader gave last."""
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.dataloader)

    def __next__(self) -> Any:
        self._fill()
        return self._rows.popleft()

    def peek(self) -> Any:
        """The row that comes next."""
        self._fill()
        return self._rows[0]

    def _fill(self) -> None:
        while not self._rows:
            if self._batches is None:
                sampler: Any = getattr(self.dataloader, "sampler", None)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(self.epoch)
                self._batches = iter(self.dataloader)
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                self.epoch += 1
            else:
                self._rows.extend(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "rows": list(self._rows), "dataloader": self.dataloader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._rows, self._batches = state["epoch"], deque(state["rows"]), None
        self.dataloader.load_state_dict(state["dataloader"])
