"""Which share of the parameters an optimizer's updates change: in a narrow type, small updates are rounded away.

Invariant: counts stay on the parameters' device until `take`, so an update waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)

ELEMENTS = 128
"""Number of compared elements per tensor, evenly spread."""
TENSORS = 64
"""Number of compared tensors, evenly spread over the layers."""
FEW = 0.05
"""Share of changed parameters below which a run warns."""


class UpdateShare:
    """Compares a sample of the parameters before and after each update.

    Args:
        parameters: tensors that the optimizer updates; of sharded tensors, this rank's rows are compared.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameters[k] for k in _spread(len(parameters), TENSORS)]
        self._places = [
            torch.tensor(_spread(_local(own).numel(), ELEMENTS), dtype=torch.long, device=own.device)
            for own in self._parameters
        ]
        self._counts: Tensor | None = None
        self._warned = False

    @contextmanager
    def of(self) -> Iterator[None]:
        """Count how many elements with non-zero gradient the update inside changes."""
        before = self._values(lambda own: own)
        meant = self._values(lambda own: torch.zeros_like(own) if own.grad is None else own.grad) != 0
        yield
        # Elements without gradient do not count: an update is not expected to change them.
        changed = (self._values(lambda own: own) != before) & meant
        counts = torch.stack((changed.sum(), meant.sum())).double()
        self._counts = counts if self._counts is None else self._counts + counts

    def take(self, total: Callable[[Tensor], Tensor] = lambda counts: counts) -> float | None:
        """Return the share since the last call; None if no parameter had a gradient. Warn once if it is small.

        Args:
            total: sums counts over ranks, all of which call this.
        """
        counts, self._counts = self._counts, None
        changed, meant = total(torch.zeros(2, dtype=torch.float64) if counts is None else counts).tolist()
        if not meant:
            return None
        share = changed / meant
        if share < FEW and not self._warned:
            self._warned = True
            log.warning(
                "updates change %.1f %% of the parameters that have a gradient; they are too small for the type of the "
                "parameters: set model.dtype to float32, or raise training.learning_rate",
                100 * share,
            )
        return float(share)

    @torch.no_grad()
    def _values(self, part: Callable[[Tensor], Tensor]) -> Tensor:
        taken = (_local(part(own)).take(places) for own, places in zip(self._parameters, self._places, strict=True))
        return torch.cat([values.float() for values in taken])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread(size: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `size`, evenly spread."""
    count = min(size, most)
    return [k * size // count for k in range(count)]
