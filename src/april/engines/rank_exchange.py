"""Orders from rank 0 to the other ranks of a job, and their replies, over `torch.distributed`.

Both trainers with engines on several ranks use it: april's own (`training/ranks.py`) and the trainers of frameworks
(`integrations/trainer_ranks.py`). `JobEngine` is what rank 0 drives the ranks' engines with.

Invariants:
- all ranks call `scatter` and `gather` in the same order;
- the end of another rank raises the trainer's own error, in every rank that waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from april.engines.job import Exchange, JobOrder, Reply

T = TypeVar("T")

CONNECTION_LOST = re.compile(
    r"gloo.transport|connection (closed|reset|refused)|closed by (remote )?peer|broken pipe|remote process exited",
    re.IGNORECASE,
)
"""Messages of gloo and NCCL about a lost connection: torch raises a plain RuntimeError for most of them."""
COLLECTIVE_FAILED = re.compile(r"gloo|timed out waiting", re.IGNORECASE)
"""Further messages of a collective operation whose peer does not answer."""


def is_connection_loss(error: BaseException) -> bool:
    """Return whether an error of any origin reports a lost connection to another process."""
    return isinstance(error, RuntimeError) and CONNECTION_LOST.search(str(error)) is not None


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an error of a collective operation that is known to work means that another rank is gone."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError)
        or is_connection_loss(error)
        or COLLECTIVE_FAILED.search(str(error)) is not None
    )


@dataclass(frozen=True, slots=True, eq=False)
class RankExchange:
    """One rank's end of the exchange.

    Args:
        rank: number of this rank; rank 0 leads.
        world: number of ranks.
        orders: process group for orders, whose timeout covers the time between two orders.
        replies: process group for replies.
        peer_loss: makes the exception to raise when another rank is gone.
    """

    rank: int
    world: int
    orders: Any
    replies: Any
    peer_loss: Callable[[RuntimeError], Exception]

    def scatter(self, items: Sequence[T]) -> T:
        """Return item r in rank r; only rank 0 passes any."""
        received: list[Any] = [None]
        with self._peer_loss_translated():
            dist.scatter_object_list(received, list(items) if self.rank == 0 else None, src=0, group=self.orders)
        return received[0]  # type: ignore[no-any-return]

    def gather(self, mine: T) -> list[T]:
        """Return the objects of all ranks, by rank, in rank 0; [] in the others."""
        gathered: Any = [None] * self.world if self.rank == 0 else None
        with self._peer_loss_translated():
            dist.gather_object(mine, gathered, dst=0, group=self.replies)
        return gathered or []

    @contextmanager
    def _peer_loss_translated(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_peer_loss(error):
                raise
            raise self.peer_loss(error) from error


def follow_orders(exchange: Exchange, carry_out: Callable[[JobOrder], Reply]) -> JobOrder:
    """Carry out the orders of rank 0 and reply to each, up to an order that ends this; return that order."""
    while (order := exchange.scatter(list[JobOrder]())).what not in ("over", "failed"):
        exchange.gather(carry_out(order))
    return order
