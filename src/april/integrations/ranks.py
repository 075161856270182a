"""One scheduler over the engines of all processes of a job.

Process 0 leads: it has the scheduler, and with it the groups, the bound and the books of the whole job. The others
follow: each generates on its own engine what it is told, for as long as the leader is at it.

Invariants:
- all engines go on in rounds. A round takes orders to every process and brings back what came of them, in the order of
  ranks, so what the scheduler sees depends on no clock: the same job samples the same tokens again;
- in a round each engine polls until it has handed out something of a sample that is unfinished, or has none left;
- a sample is in flight on one engine at most;
- an error of the leader ends the followers, and a process that is gone ends the job: nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread, current_thread, main_thread
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from april.engines.chunk_queue import parted
from april.engines.routing import Router
from april.engines.weights import WeightTransfer
from april.rollout.engine import Capacity, Chunk, Engine, EngineError
from april.rollout.event_loop import EventLoop
from april.rollout.trajectory import Sample

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long a follower waits for orders: a step over servers needs none."""
FAREWELL = timedelta(seconds=30)
"""How long a follower leaves a leader that has failed to say why."""
AFFINITY = 0.25
"""How much more load, as a share of its slots, an engine may have and be given back samples whose prefix it holds."""


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


@dataclass(slots=True)
class JobOrder:
    """What one process is to do: samples to forget and to submit, and then the rest."""

    what: Literal["poll", "interrupt", "update", "over", "failed"]
    forget: list[list[str] | None] = field(default_factory=list)
    submit: list[Sample] = field(default_factory=list)
    version: int = 0
    stop: list[str] | None = None
    """Samples to interrupt; None is all of them."""
    result: Any = None


@dataclass(slots=True)
class Reply:
    chunks: list[Chunk]
    running: int
    error: str | None = None


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


class Hands:
    """The engine of one process, and how it carries out orders.

    Args:
        transfer: brings this process's weights to it.
    """

    def __init__(self, engine: Engine, transfer: WeightTransfer, loop: EventLoop) -> None:
        self.engine = engine
        self.transfer = transfer
        self._loop = loop
        self._in_flight: set[str] = set()
        self._came: list[Chunk] = []

    def __call__(self, order: JobOrder) -> Reply:
        """Carry out an order of the leader's; an error is part of the reply."""
        offer = self.transfer.offer(order.version) if order.what == "update" else None
        return self._loop.run(self.obey(order, offer))

    async def obey(self, order: JobOrder, weights: Any = None) -> Reply:
        error = None
        try:
            for names in order.forget:
                self.engine.forget(names)
            for sample in order.submit:
                self.engine.submit(sample)
                self._in_flight.add(sample.id)
            match order.what:
                case "update":
                    await self.engine.update_weights(order.version, weights)
                case "interrupt":
                    self._in_flight.difference_update(list(self._in_flight) if order.stop is None else order.stop)
                    self._came += await self.engine.interrupt(order.stop)
                case "poll":
                    await self._poll()
        except (EngineError, ValueError) as failure:
            error = str(failure)
        came, self._came = self._came, []
        return Reply(came, self.engine.running, error)

    async def _poll(self) -> None:
        shown = False
        while self._in_flight and not shown:
            came = await self.engine.poll()
            self._came += came
            self._in_flight -= {chunk.sample_id for chunk in came if ended(chunk)}
            shown = any(chunk.finish is None for chunk in came)


def ended(chunk: Chunk) -> bool:
    """Whether its sample is no longer in flight."""
    return chunk.finish is not None or chunk.error is not None


class Place:
    """Where samples may be: one process's engine, as the leader knows it."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.in_flight: set[str] = set()
        self.running = 0
        self.submit: list[Sample] = []
        self.forget: list[list[str] | None] = []

    @property
    def load(self) -> float:
        return len(self.in_flight) / self.capacity.slots


class JobEngine:
    """All processes' engines as one, in the leader; made in all of them at the same time, and returned to none but it.

    Args:
        job: its processes, which follow (`Job.together`) while this engine is used.
        hands: this process's engine.
        capacities: of the processes' engines.
        keeps: their KV caches outlive a weight update.
    """

    def __init__(self, job: Job, hands: Hands, capacities: Sequence[Capacity], keeps: bool) -> None:
        self._job = job
        self._keeps = keeps
        self._hands = hands
        self._places = [Place(capacity) for capacity in capacities]
        self._router: Router[Place] = Router(AFFINITY)
        self._at: dict[str, Place] = {}
        self._came: list[Chunk] = []
        self._round: asyncio.Task[None] | None = None
        kv_tokens = [capacity.kv_tokens for capacity in capacities if capacity.kv_tokens is not None]
        self.capacity = Capacity(
            slots=sum(capacity.slots for capacity in capacities),
            context_length=min(capacity.context_length for capacity in capacities),
            kv_tokens=sum(kv_tokens) if len(kv_tokens) == len(capacities) else None,
        )

    @property
    def running(self) -> int:
        return sum(place.running for place in self._places)

    def submit(self, sample: Sample) -> None:
        place = self._router.choose(sample.id, self._places)
        assert place is not None
        assert sample.id not in self._at, f"sample {sample.id} is in flight already"
        if (left := self._router.place(sample.id, place)) is not None:
            left.forget.append([sample.id])
        place.submit.append(sample)
        place.in_flight.add(sample.id)
        self._at[sample.id] = place

    async def poll(self) -> list[Chunk]:
        while self._at and not self._came:
            await self._finish(self._begin("poll"))
        return self._take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        stopped = [id for id in self._at if named is None or id in named]
        try:
            if stopped or self._round is not None:
                await self._finish(self._begin("interrupt", stop=None if named is None else stopped))
        except EngineError:  # one engine failed: no process counts on these samples any more
            self._stopped(stopped)
            raise
        self._stopped(stopped)
        return self._take(named)

    def _stopped(self, ids: Iterable[str]) -> None:
        for id in ids:
            if (place := self._at.pop(id, None)) is not None:
                place.in_flight.discard(id)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await self._finish(self._begin("update", version, weights))
        if not self._keeps:
            self._router.forget_homes()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        names = None if sample_ids is None else list(sample_ids)
        self._router.forget(names)
        for place in self._places:
            place.forget.append(names)

    async def close(self) -> None:
        """Each process closes its own."""

    def _take(self, sample_ids: Container[str] | None = None) -> list[Chunk]:
        came, self._came = parted(self._came, sample_ids)
        return came

    def _begin(
        self, what: Any, version: int = 0, weights: Any = None, stop: list[str] | None = None
    ) -> asyncio.Task[None]:
        """The round that runs already, if one does and a poll will do; else a new one, after it."""
        running = self._round
        if running is None or what != "poll":
            self._round = asyncio.create_task(
                self._go_round(running, what, version, weights, stop), name=f"round: {what}"
            )
        assert self._round is not None
        return self._round

    async def _finish(self, task: asyncio.Task[None]) -> None:
        """Wait for a round. It cannot be called back: if the wait is cancelled, what it brings is kept."""
        try:
            await asyncio.shield(task)
        finally:
            if task.done() and self._round is task:
                self._round = None

    async def _go_round(
        self, before: asyncio.Task[None] | None, what: Any, version: int, weights: Any, stop: list[str] | None
    ) -> None:
        if before is not None:
            with suppress(EngineError):
                await before
        orders = []
        for place in self._places:
            orders.append(JobOrder(what, place.forget, place.submit, version, stop))
            place.forget, place.submit = [], []
        own: JobOrder = await asyncio.to_thread(self._job.scatter, orders)
        reply = await self._hands.obey(own, weights)
        replies: list[Reply] = await asyncio.to_thread(self._job.gather, reply)
        for place, reply in zip(self._places, replies, strict=True):
            place.running = reply.running
            self._came += reply.chunks
            for chunk in filter(ended, reply.chunks):
                place.in_flight.discard(chunk.sample_id)
                self._at.pop(chunk.sample_id, None)
        for rank, reply in enumerate(replies):
            if reply.error is not None:
                raise EngineError(f"process {rank}: {reply.error}")
