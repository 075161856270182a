"""Many replicas as one engine.

Invariants:
- a sample in flight is in exactly one place: on one member, being moved, or waiting for a member to be ready;
- the pool follows every token it hands out in a copy of the sample, so a sample goes on elsewhere from the last token
  that any replica streamed, whether or not it has been polled;
- a member gets work only while it is ready, and it is ready only while it holds the current weights; what one samples
  with others, because it was restarted and nobody has noticed, is not handed out;
- a request that failed is handed on as such once its replica is known to be well: when it is tried again is the
  caller's business, where is the pool's;
- the samples of a lost replica go on elsewhere; those that lose a second replica without a token between are handed on,
  for the caller to find the sample that takes replicas down;
- after `interrupt` no replica runs anything; only attempts to bring lost ones back outlive it, until `close`.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Container, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from april.engines.chunk_queue import ChunkQueue
from april.engines.member import Member, State
from april.engines.replica import replica_of
from april.engines.routing import Router
from april.engines.weight_sync import WeightSync
from april.rollout.engine import Capacity, Chunk, Engine, EngineError, Fault
from april.rollout.trajectory import Sample, Segment

log = logging.getLogger(__name__)


class EnginePool:
    """Replicas behind one `Engine`.

    A replica is asked after its health; one that does not answer, that fails too large a share of its requests, or that
    no longer holds the weights it was given is lost: its samples go on elsewhere (see `routing.py`). It is brought back
    in the background, and gets the current weights before it gets work.

    Args:
        engines: of one model with the same settings. Those that are no `Replica` are taken to live as long as this
            process.
        health_interval: seconds between health checks while samples are in flight.
        health_timeout: seconds a health check may take.
        update_timeout: seconds a replica may take to take up weights.
        max_failure_share: share of its latest requests (about 100) that may fail before a replica is lost.
        min_failures: failures below which no share counts.
        affinity: how much more load, as a share of its slots, a replica may have and still be given back the samples
            whose prefixes it holds.
        patience: seconds to wait with no replica ready, in a step or before an update, before the pool itself fails, as
            at the limit of an outage.
        backlog: chunks kept for a slow reader before replicas are left unread.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        health_interval: float = 5.0,
        health_timeout: float = 15.0,
        update_timeout: float = 900.0,
        max_failure_share: float = 0.5,
        min_failures: int = 5,
        affinity: float = 0.25,
        patience: float = 600.0,
        backlog: int = 4096,
    ) -> None:
        if not engines:
            raise ValueError("a pool needs at least one replica")
        self.members = [Member(replica_of(engine, index)) for index, engine in enumerate(engines)]
        self._weight_sync = WeightSync(self.members, self._came_back, health_timeout, update_timeout, patience)
        self._router: Router[Member] = Router(affinity)
        self._health_interval = health_interval
        self._health_timeout = health_timeout
        self._failing = (max_failure_share, min_failures)
        self._patience = patience
        self._waiting: dict[str, Sample] = {}
        self._bereaved: set[str] = set()
        """Samples that have lost a replica and brought no token since."""
        self._stopping: set[str] = set()
        """Samples that are being interrupted: they go nowhere else, and what fails of them is no failure."""
        self._queue = ChunkQueue(backlog)
        self._defect: Exception | None = None
        """What a replica raised that is no `EngineError`: whoever polls gets it, as from that engine alone."""
        self._failure: EngineError | None = None
        """Why the pool cannot go on."""
        self._cannot_go_on = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._moves: set[asyncio.Task[None]] = set()

    def add(self, engine: Engine) -> None:
        """Take in one more replica. It is brought to the current weights in the background, and gets work then."""
        member = Member(replica_of(engine, len(self.members)), state=State.LOST, reason="it has not been started yet")
        self.members.append(member)
        self._weight_sync.bring_back(member)

    def wake(self) -> None:
        """Something has changed that lost replicas may have waited for: try at once to bring them back."""
        self._weight_sync.wake()

    def fail(self, reason: EngineError) -> None:
        """The pool cannot go on: whoever polls next, or waits for an update, is told why."""
        self._defect = self._failure = reason
        self._cannot_go_on.set()
        self._queue.wake()

    @property
    def version(self) -> int:
        return self._weight_sync.version

    @property
    def capacity(self) -> Capacity:
        return Capacity.together([member.replica.capacity for member in self.members])

    @property
    def running(self) -> int:
        return sum(member.replica.running for member in self._ready)

    @property
    def _ready(self) -> list[Member]:
        return [member for member in self.members if member.ready]

    def submit(self, sample: Sample) -> None:
        segments = [Segment(s.version, array("i", s.token_ids), array("d", s.logprobs)) for s in sample.segments]
        self._bereaved.discard(sample.id)
        self._place(replace(sample, segments=segments))
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_health(), name="pool health")

    def _place(self, sample: Sample) -> None:
        """Give a sample to a replica, or let it wait for one."""
        member = self._router.choose(sample.id, self._ready)
        if member is None:
            self._waiting[sample.id] = sample
            return
        member.replica.submit(sample)
        member.samples[sample.id] = sample
        member.given += 1
        member.failures.began()
        if (left := self._router.place(sample.id, member)) is not None:
            left.replica.forget([sample.id])
        self._start_pump(member)

    def _start_pump(self, member: Member) -> None:
        if member.pump is None or member.pump.done():
            member.pump = asyncio.create_task(self._pump(member), name=f"pump {member.name}")

    def _place_or_fail(self, sample: Sample) -> None:
        if sample.id in self._stopping:
            return
        try:
            self._place(sample)
        except ValueError as error:
            self._queue.put(Chunk(sample.id, (), (), self.version, error=str(error), fault=Fault.REFUSED))

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._in_flight:
            self._weight_sync.require_hope()
            if self._defect is not None:
                defect, self._defect = self._defect, None
                raise defect
            try:
                async with asyncio.timeout(None if self._ready else self._patience):
                    await self._queue.ready()
            except TimeoutError:
                reasons = self._weight_sync.reasons()
                raise EngineError(f"no replica was ready for {self._patience:g} s: {reasons}") from None
        return self._queue.take()

    @property
    def _in_flight(self) -> bool:
        return bool(self._waiting or self._moves or any(member.samples or member.failed for member in self.members))

    @property
    def _places(self) -> list[dict[str, Any]]:
        """Where samples are but for those that are being moved."""
        return [self._waiting, *(place for member in self.members for place in (member.samples, member.failed))]

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        stopping = {id for place in self._places for id in place if named is None or id in named}
        self._stopping |= stopping
        try:
            await asyncio.gather(*(self._interrupt(member, stopping) for member in self._ready))
            while self._moves:  # a replica that is lost gives its samples back when what it had streamed has come
                await asyncio.wait(self._moves)
        except asyncio.CancelledError:
            # What may still run on a replica stays known as such, so that the next interrupt stops it.
            for member in self._ready:
                if not stopping.issuperset(member.samples):
                    self._start_pump(member)
            raise
        else:
            for place in self._places:
                for id in stopping.intersection(place):
                    del place[id]
            if not self._in_flight:
                await _stop([self._watch])
                self._watch = None
        finally:
            self._stopping -= stopping
        self._queue.wake()
        return self._queue.take(named)

    async def _interrupt(self, member: Member, sample_ids: Container[str]) -> None:
        """Stop those of the named samples that are on this member."""
        own = [id for id in member.samples if id in sample_ids]
        if not own:
            return
        await _stop([member.pump])
        try:
            for chunk in await member.replica.interrupt(own):
                self._forward(member, chunk)
        except EngineError as error:
            self._lose(member, str(error))
        else:
            for id in own:
                member.samples.pop(id, None)
            if member.samples and member.ready:
                self._start_pump(member)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Have all replicas go over to policy `version` together.

        A replica that is lost, or found to be, gets the weights when it comes back. If all are, the first to come back
        within `patience` is waited for.

        Raises:
            ValueError: there are no weights there; nothing has changed.
            EngineError: no replica came back, or one failed to take the weights up, and the message names it. The pool
                stays at its version: the other replicas are given their former weights back before they get work, and
                the update may be tried again. Or the pool cannot go on.
        """
        await self._unless_failed(self._weight_sync.update_all(version, weights))
        if self.members[0].replica.on_update == "recompute":
            self._router.forget_homes()

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """`work`, which is given up once the pool cannot go on."""
        doing, failing = asyncio.create_task(work), asyncio.create_task(self._cannot_go_on.wait())
        try:
            await asyncio.wait((doing, failing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failing.cancel()
            await _stop([doing])
        if doing.cancelled() and self._failure is not None:
            raise self._failure
        doing.result()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        names = None if sample_ids is None else list(sample_ids)
        self._router.forget(names)
        if names is not None:
            self._bereaved.difference_update(names)
        for member in self.members:
            member.replica.forget(names)

    async def close(self) -> None:
        own = [task for member in self.members for task in (member.pump, member.check, member.revival)]
        await _stop([self._watch, *own, *self._moves])
        await asyncio.gather(*(member.replica.close() for member in self.members))

    async def _pump(self, member: Member) -> None:
        """Hand on what a replica samples, as long as it has samples."""
        while member.samples:
            try:
                chunks = await member.replica.poll()
            except EngineError as error:
                self._lose(member, str(error))
                return
            except Exception as defect:
                self._defect = defect
                self._queue.wake()
                return
            for chunk in chunks:
                self._forward(member, chunk)
            if not chunks and member.samples:
                self._lose(member, f"it lost track of {len(member.samples)} samples")
                return
            if self._queue.full:
                await self._queue.space()

    def _forward(self, member: Member, chunk: Chunk) -> None:
        sample = member.samples.get(chunk.sample_id)
        if sample is None:
            return
        try:
            self._require_current(member, sample, chunk)
            sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        except ValueError as nonsense:
            self._lose(member, f"it answered nonsense: {nonsense}")
            del member.samples[sample.id]  # what follows in the same batch would leave a gap
            self._router.forget([sample.id])
            self._place_or_fail(sample)
            return
        if chunk.token_ids or chunk.finish is not None:
            self._router.went_on(sample.id)
            self._bereaved.discard(sample.id)
            self._queue.put(chunk if chunk.error is None else chunk._replace(error=None))
        if chunk.finish is not None:
            del member.samples[sample.id]
            if sample.finish is not None:  # else its turn has, and its prefix stays where it is
                self._router.forget([sample.id])
        elif chunk.error is not None:
            del member.samples[sample.id]
            self._failed(member, sample, chunk)

    def _require_current(self, member: Member, sample: Sample, chunk: Chunk) -> None:
        """See that tokens are of the weights that the replica was given, if it was given any. With "keep", those that a
        sample had when it was interrupted may come when it is resumed."""
        if chunk.version == self.version or not chunk.token_ids or not self._weight_sync.updated:
            return
        if member.replica.on_update == "recompute" or not sample.segments:
            raise ValueError(f"tokens of policy version {chunk.version} came where it was given {self.version}")

    def _failed(self, member: Member, sample: Sample, chunk: Chunk) -> None:
        """A request failed: the replica is looked at, and the failure is handed on if the replica is well."""
        if sample.id in self._stopping:
            return
        error = chunk.error or ""
        log.info("%s: a request for sample %s failed: %s", member.name, sample.id, error)
        self._router.failed(sample.id, member)
        member.failed[sample.id] = sample, chunk
        member.failures.failed()
        if member.failures.reaches(*self._failing):
            self._lose(member, f"{member.failures}, the last with: {error}")
        elif member.check is None or member.check.done():
            member.check = asyncio.create_task(self._check(member), name=f"check {member.name}")

    def _hand_on_failures(self, member: Member, chunks: Iterable[tuple[Sample, Chunk]]) -> None:
        for sample, chunk in chunks:
            if member.failed.pop(sample.id, None) is not None:
                error = chunk.error or ""
                named = error if error.startswith(member.name) else f"{member.name}: {error}"
                self._queue.put(Chunk(sample.id, (), (), self.version, error=named, fault=chunk.fault))

    def _lose(self, member: Member, reason: str) -> None:
        """Take a replica out, its samples elsewhere, and try to bring it back."""
        if member.ready:
            member.become(State.LOST, reason)
            self._begin(self._salvage(member))

    async def _salvage(self, member: Member) -> None:
        """Take over what a lost replica had streamed, and everything it had not finished."""
        if member.pump is not asyncio.current_task():
            await _stop([member.pump])
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._health_timeout):
                for chunk in await member.replica.abandon():
                    self._forward(member, chunk._replace(error=None))
        samples = [*member.samples.values(), *(sample for sample, _ in member.failed.values())]
        member.samples, member.failed = {}, {}
        self._router.forget(sample.id for sample in samples)
        for sample in samples:
            if sample.id in self._stopping:
                continue
            if sample.id in self._bereaved:
                lost = f"it lost two replicas without a token between; {member.name}: {member.reason}"
                self._queue.put(Chunk(sample.id, (), (), self.version, error=lost, fault=Fault.LOST))
            else:
                self._bereaved.add(sample.id)
                self._place_or_fail(sample)
        self._weight_sync.bring_back(member)
        if not self._ready and self._in_flight:
            log.warning("no replica is ready; all samples wait for at most %g s (outage_limit)", self._patience)

    def _came_back(self) -> None:
        """A replica is ready again, or will never be: the queue is looked at."""
        self._queue.wake()
        waiting, self._waiting = self._waiting, {}
        for sample in waiting.values():
            self._place_or_fail(sample)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._health_interval)
            await asyncio.gather(*(self._check(member) for member in self._ready))

    async def _check(self, member: Member) -> None:
        while member.ready:
            failed = list(member.failed.values())
            if (trouble := await member.trouble(self._health_timeout)) is not None:
                self._lose(member, trouble)
                return
            self._hand_on_failures(member, failed)
            if not member.failed:  # else a request has failed meanwhile
                return

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._moves.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._moves.discard(task)
            self._queue.wake()

        task.add_done_callback(ended)


async def _stop(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    alive: list[Awaitable[None]] = []
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            alive.append(task)
    await asyncio.gather(*alive, return_exceptions=True)
