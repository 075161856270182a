"""The processes of a framework's trainer as one job.

Rank 0 leads: it has the scheduler, and with it the groups, the staleness bound and the metrics of the whole job. The
other ranks follow while the leader is in `together`: each generates on its own engine as ordered (`engines/job.py`).

Invariant: an error of the leader ends the followers, and the loss of a process ends the job: no process waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from april.engines.job import JobOrder, Reply
from april.engines.rank_exchange import RankExchange, follow_orders, is_connection_loss
from april.rollout.engine import EngineError

T = TypeVar("T")

ORDER_TIMEOUT = timedelta(days=7)
"""How long a follower waits for orders: a step over servers gives none."""
FAILURE_SECONDS = timedelta(seconds=30)
"""How long a follower waits for a leader that has failed to print its error."""


class JobLostError(EngineError):
    """A process of the job is gone."""

    def __init__(self) -> None:
        super().__init__("a process of this job has ended, and the others cannot go on without it")


def is_job_loss(error: BaseException) -> bool:
    """Return whether the end of another process of the job caused `error`.

    Errors of the framework's own collective operations count only if they report a lost connection: others, such as a
    duplicate GPU, are errors of the configuration with every process alive.
    """
    return isinstance(error, JobLostError) or is_connection_loss(error)


class TrainerRanks:
    """The processes that train together; a process alone is a job, too.

    All processes call `gather`, `scatter` and `together`, in the same order.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.leads = self.rank == 0
        self._group = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT) if self.size > 1 else None
        self._exchange = RankExchange(self.rank, self.size, self._group, self._group, lambda _: JobLostError())

    def gather(self, mine: T) -> list[T]:
        """Return the objects of all processes, by rank, to the leader; [] to the others."""
        return [mine] if self._group is None else self._exchange.gather(mine)

    def scatter(self, items: Sequence[T]) -> T:
        """Return item r in process r; only the leader passes any."""
        return items[0] if self._group is None else self._exchange.scatter(items)

    def together(self, lead: Callable[[], Sequence[T]], follow: Callable[[JobOrder], Reply]) -> T:
        """Run `lead` in the leader while the others carry out its orders; return item r of its result in process r.

        Raises:
            SystemExit: in a follower, if the leader has failed. The leader raises its error.
        """
        if not self.leads:
            order = follow_orders(self._exchange, follow)
            if order.what == "failed":
                self._exit_after_leader()
            return order.result  # type: ignore[no-any-return]
        try:
            results = lead()
        except BaseException:
            if self._group is not None:
                # The leader raises its own error even if followers are gone.
                with suppress(JobLostError):
                    self.scatter([JobOrder("failed")] * self.size)
            raise
        mine: T = self.scatter([JobOrder("over", result=result) for result in results]).result
        return mine

    def _exit_after_leader(self) -> None:
        """Exit once the leader has: a launcher stops all processes when the first one ends, and the leader has the
        error to print."""
        assert self._group is not None
        with suppress(RuntimeError):
            dist.barrier(group=self._group, async_op=True).wait(FAILURE_SECONDS)
        raise SystemExit(1)

    def first(self, name: str) -> bool:
        """Whether no other process has asked for `name` before. It works without the other processes."""
        if self._group is None:
            return True
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            return int(store.add(f"april/{name}", 1)) == 1
        # The store was in a process that is gone: two messages are better than none.
        except RuntimeError:
            return True
