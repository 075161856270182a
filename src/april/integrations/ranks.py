"""The processes of somebody else's trainer as one job.

Process 0 leads: it has the scheduler, and with it the groups, the bound and the books of the whole job. The others
follow for as long as the leader is at it: each generates on its own engine as it is ordered (`engines/job.py`).

Invariant: an error of the leader ends the followers, and a process that is gone ends the job: nobody waits for ever.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

import torch.distributed as dist

from april.engines.job import JobOrder, Reply
from april.rollout.engine import EngineError

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long a follower waits for orders: a step over servers needs none."""
FAREWELL = timedelta(seconds=30)
"""How long a follower leaves a leader that has failed to say why."""


class JobLostError(EngineError):
    """A process of the job is gone."""

    def __init__(self) -> None:
        super().__init__("a process of this job has ended, and the others cannot go on without it")


def lost(error: BaseException) -> bool:
    """Whether `error` is what a process sees of another's end."""
    gone = (
        r"gloo.transport|connection (closed|reset|refused)|closed by (remote )?peer|broken pipe|remote process exited"
    )
    return isinstance(error, JobLostError) or (
        isinstance(error, RuntimeError) and re.search(gone, str(error), re.IGNORECASE) is not None
    )


class Job:
    """The processes that train together; one process alone is a job as well.

    Every method that says so is called by all of them.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.leads = self.rank == 0
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.size > 1 else None

    def gather(self, mine: T) -> list[T]:
        """Called by all: what each process has, in the order of ranks; only the leader gets it, the others get []."""
        if self._group is None:
            return [mine]
        everyone: Any = [None] * self.size if self.leads else None
        try:
            dist.gather_object(mine, everyone, group=self._group)
        except RuntimeError as error:
            raise JobLostError from error
        return everyone or []

    def scatter(self, items: Sequence[T]) -> T:
        """Called by all: item r goes to process r; only the leader has any."""
        if self._group is None:
            return items[0]
        mine: list[Any] = [None]
        try:
            dist.scatter_object_list(mine, list(items) if self.leads else None, group=self._group)
        except RuntimeError as error:
            raise JobLostError from error
        return mine[0]  # type: ignore[no-any-return]

    def together(self, lead: Callable[[], Sequence[T]], follow: Callable[[JobOrder], Reply]) -> T:
        """Called by all: the leader runs `lead`, the others do what it orders; item r of its result is process r's.

        Raises:
            SystemExit: in a follower, when the leader has failed. The leader raises its error.
        """
        if not self.leads:
            return self._follow(follow)  # type: ignore[no-any-return]
        try:
            results = lead()
        except BaseException:
            if self._group is not None:
                with suppress(JobLostError):
                    self.scatter([JobOrder("failed")] * self.size)
            raise
        mine: T = self.scatter([JobOrder("over", result=result) for result in results]).result
        return mine

    def _follow(self, follow: Callable[[JobOrder], Reply]) -> Any:
        while True:
            order: JobOrder = self.scatter([])
            if order.what == "over":
                return order.result
            if order.what == "failed":
                self._wait_for_the_end()
            self.gather(follow(order))

    def _wait_for_the_end(self) -> None:
        """A launcher stops all processes when the first one ends: that should be the one that knows why."""
        assert self._group is not None
        with suppress(RuntimeError):
            dist.barrier(group=self._group, async_op=True).wait(FAREWELL)
        raise SystemExit(1)

    def first(self, name: str) -> bool:
        """Whether no other process has asked for `name` yet. It needs no other process to be alive."""
        if self._group is None:
            return True
        try:
            return dist.distributed_c10d._get_default_store().add(f"april/{name}", 1) == 1
        except RuntimeError:
            return True


@contextmanager
def last_words(job: Job, words: Callable[[str], str]) -> Iterator[None]:
    """Print `words(what has happened)` if another process of the job ends in here: once a job, by the first to know.

    A process knows by an error of its own, or because the launcher, which has seen it sooner, ends this one too (by
    SIGTERM, at which it ends at once, whatever it waits for). A handler of SIGTERM that somebody else has set is left
    alone.

    Raises:
        SystemExit: another process has ended.
    """
    if job.size == 1:
        yield
        return

    def say(what: str) -> None:
        if job.first("a process has ended"):
            print(words(what), file=sys.stderr, flush=True)

    def listen(told: int) -> None:
        with open(told, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] == signal.SIGTERM:
                    say("this process was told to end (SIGTERM), as when another one of the job has ended")
                    os._exit(128 + signal.SIGTERM)

    def handler(*_: Any) -> None:
        """Python's own part, which waits for the main thread: what is to be done is done by then."""

    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and current_thread() is main_thread()
    if ours:
        told, telling = os.pipe()
        os.set_blocking(telling, False)
        before = signal.set_wakeup_fd(telling)
        signal.signal(signal.SIGTERM, handler)
        Thread(target=listen, args=(told,), daemon=True).start()
    try:
        yield
    except Exception as error:
        if not lost(error):
            raise
        if ours and signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # between asking who is first and saying it
        say("a process of this job has ended, and the others cannot go on without it")
        raise SystemExit(1) from None
    finally:
        if ours:
            signal.set_wakeup_fd(before)
            os.close(telling)
            if signal.getsignal(signal.SIGTERM) in (handler, signal.SIG_IGN):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
