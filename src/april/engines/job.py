"""The engines of several processes as one, which the first process drives.

Process 0 leads: it has the scheduler. The others follow: each generates on its own engine as it is ordered.

Invariants:
- all engines work in rounds. A round sends an order to every process and gathers the replies in the order of ranks, so
  the scheduler's input depends on no clock: the same job samples the same tokens again;
- in a round each engine polls until it has handed out something of a sample that is unfinished, or has none left;
- a sample is in flight on one engine at most;
- processes that compute one engine together get the same order in the same round, and sample the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from april.engines.chunk_queue import parted
from april.engines.routing import Router
from april.rollout.engine import Capacity, Chunk, Engine, EngineError
from april.rollout.trajectory.sample import Sample

T = TypeVar("T")

AFFINITY = 0.25
"""How much more load, as a share of its slots, an engine may have and be given back samples whose prefix it holds."""


@dataclass(slots=True)
class JobOrder:
    """An order to one process: samples to forget and to submit, followed by one action."""

    what: Literal["poll", "interrupt", "update", "sleep", "wake_weights", "wake_kv_cache", "over", "failed"]
    forget: list[list[str] | None] = field(default_factory=list)
    submit: list[Sample] = field(default_factory=list)
    version: int = 0
    stop: list[str] | None = None
    """Samples to interrupt; None is all of them."""
    result: Any = None


@dataclass(slots=True)
class Reply:
    """Result of an order, with the engine's load and capacity, which shrinks if memory runs out."""

    chunks: list[Chunk]
    running: int
    capacity: Capacity
    error: str | None = None


class Exchange(Protocol):
    """Collective exchange of orders and replies between the processes of a job; all of them call both methods."""

    def scatter(self, items: Sequence[T]) -> T:
        """Return item r in process r; only the leader has any."""
        ...

    def gather(self, mine: T) -> list[T]:
        """Return what each process has, in the order of ranks, to the leader; [] to the others."""
        ...


class LocalEngineWorker:
    """The engine of one process, and how it carries out orders."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._in_flight: set[str] = set()
        self._arrived: list[Chunk] = []

    async def execute(self, order: JobOrder, weights: Any = None) -> Reply:
        """Carry out an order of the leader's; an error is part of the reply.

        Args:
            weights: new weights of this process's engine, if the order is an update.
        """
        error = None
        try:
            # Forget first: a sample that is submitted may have an id that is in the list.
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
                    self._arrived += await self.engine.interrupt(order.stop)
                case "sleep" | "wake_weights" | "wake_kv_cache" as turn:
                    await getattr(self.engine, turn)()
                case "poll":
                    await self._poll()
        except (EngineError, ValueError) as failure:
            # Part of the reply: if this process raised and left, all others would wait in the next collective.
            error = str(failure)
        arrived, self._arrived = self._arrived, []
        return Reply(arrived, self.engine.running, self.engine.capacity, error)

    async def _poll(self) -> None:
        shown = False
        while self._in_flight and not shown:
            arrived = await self.engine.poll()
            self._arrived += arrived
            self._in_flight -= {chunk.sample_id for chunk in arrived if ended(chunk)}
            shown = any(chunk.finish is None for chunk in arrived)


def ended(chunk: Chunk) -> bool:
    """Return whether the chunk ends its request."""
    return chunk.finish is not None or chunk.error is not None


class JobMember:
    """The leader's record of one process's engine, with the fields of a pool's member."""

    place, ready, reason, losses = "", True, "", 0

    def __init__(self, capacity: Capacity, name: str) -> None:
        self.capacity = capacity
        self.name = name
        self.in_flight: set[str] = set()
        self.running = 0
        self.given = 0
        self.submit: list[Sample] = []
        self.forget: list[list[str] | None] = []

    @property
    def slots(self) -> int:
        return self.capacity.slots

    @property
    def load(self) -> float:
        return len(self.in_flight) / self.capacity.slots


class JobEngine:
    """All processes' engines as one, in the leader; made in all of them at the same time, and returned to none but it.

    Args:
        job: processes of the job, which follow while this engine is used.
        worker: this process's engine.
        capacities: capacities of the processes' engines.
        keeps: whether their KV caches outlive a weight update.
        name: name of a process in messages, followed by its number.
        ranks_per_engine: consecutive processes that compute one engine together (tensor parallelism).
    """

    def __init__(
        self,
        job: Exchange,
        worker: LocalEngineWorker,
        capacities: Sequence[Capacity],
        keeps: bool,
        name: str = "process",
        ranks_per_engine: int = 1,
    ) -> None:
        self._job = job
        self._ranks_per_engine = ranks_per_engine
        self._keeps = keeps
        self._worker = worker
        firsts = range(0, len(capacities), ranks_per_engine)
        self.members = [JobMember(capacities[rank], f"{name} {rank}") for rank in firsts]
        self._router: Router[JobMember] = Router(AFFINITY)
        self._at: dict[str, JobMember] = {}
        self._arrived: list[Chunk] = []
        self._round: asyncio.Task[None] | None = None

    @property
    def capacity(self) -> Capacity:
        return Capacity.together([member.capacity for member in self.members])

    @property
    def running(self) -> int:
        return sum(member.running for member in self.members)

    @property
    def kv_cache_bytes(self) -> int | None:
        """The most that keys and values took so far in this process."""
        return getattr(self._worker.engine, "kv_cache_bytes", None)

    def submit(self, sample: Sample) -> None:
        member = self._router.choose(sample.id, self.members)
        assert member is not None
        assert sample.id not in self._at, f"sample {sample.id} is in flight already"
        if (left := self._router.place(sample.id, member)) is not None:
            left.forget.append([sample.id])
        member.submit.append(sample.with_outlined_routes())
        member.in_flight.add(sample.id)
        member.given += 1
        self._at[sample.id] = member

    async def poll(self) -> list[Chunk]:
        while self._at and not self._arrived:
            await self._finish(self._begin("poll"))
        return self._take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        stopped = [id for id in self._at if named is None or id in named]
        try:
            # A poll that was cancelled leaves its round running. Its chunks belong to the result.
            if stopped or self._round is not None:
                await self._finish(self._begin("interrupt", stop=None if named is None else stopped))
        except EngineError:  # one engine failed: no process counts on these samples any more
            self._stopped(stopped)
            raise
        self._stopped(stopped)
        return self._take(named)

    def _stopped(self, ids: Iterable[str]) -> None:
        for id in ids:
            if (member := self._at.pop(id, None)) is not None:
                member.in_flight.discard(id)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await self._finish(self._begin("update", version, weights))
        if not self._keeps:
            self._router.forget_homes()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        names = None if sample_ids is None else list(sample_ids)
        self._router.forget(names)
        for member in self.members:
            member.forget.append(names)

    async def close(self) -> None:
        """Each process closes its own."""

    def _take(self, sample_ids: Container[str] | None = None) -> list[Chunk]:
        arrived, self._arrived = parted(self._arrived, sample_ids)
        return arrived

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
        """Wait for a round, which cannot be cancelled: if the wait is, its chunks are kept for the next call."""
        try:
            await asyncio.shield(task)
        finally:
            if task.done() and self._round is task:
                self._round = None

    async def _go_round(
        self, before: asyncio.Task[None] | None, what: Any, version: int, weights: Any, stop: list[str] | None
    ) -> None:
        # All processes must call the collectives in the same order, so rounds do not overlap.
        # An error of the earlier round is raised where that round is awaited.
        if before is not None:
            with suppress(EngineError):
                await before
        orders = []
        for member in self.members:
            orders += [JobOrder(what, member.forget, member.submit, version, stop)] * self._ranks_per_engine
            member.forget, member.submit = [], []
        # Collectives block until the slowest process takes part, so they run in a thread.
        own: JobOrder = await asyncio.to_thread(self._job.scatter, orders)
        reply = await self._worker.execute(own, weights)
        replies = _one_per_engine(await asyncio.to_thread(self._job.gather, reply), self._ranks_per_engine)
        for member, reply in zip(self.members, replies, strict=True):
            member.running, member.capacity = reply.running, reply.capacity
            self._arrived += reply.chunks
            for chunk in filter(ended, reply.chunks):
                member.in_flight.discard(chunk.sample_id)
                self._at.pop(chunk.sample_id, None)
        # Raise only now: the chunks of all other engines must not be lost.
        for member, reply in zip(self.members, replies, strict=True):
            if reply.error is not None:
                raise EngineError(f"{member.name}: {reply.error}")


def _one_per_engine(replies: Sequence[Reply], ranks: int) -> list[Reply]:
    """Return the reply of the first of every `ranks` processes, which compute one engine together; with an error, if
    another one of them has failed or sampled other tokens."""
    firsts = []
    for begin in range(0, len(replies), ranks):
        first = replies[begin]
        for rank, other in enumerate(replies[begin + 1 : begin + ranks], begin + 1):
            first.error = first.error or other.error
            if first.error is None and _tokens(other) != _tokens(first):
                first.error = f"process {rank} computes the same engine and sampled other tokens"
        firsts.append(first)
    return firsts


def _tokens(reply: Reply) -> list[tuple[str, list[int], Any]]:
    return [(chunk.sample_id, list(chunk.token_ids), chunk.finish) for chunk in reply.chunks]
