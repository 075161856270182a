"""Many replicas behind one `Engine`.

Invariants:
- a sample in flight is in exactly one place: waiting for a ready replica, on a replica, or failed and held back while
  its replica is checked;
- a replica gets work only while it is READY, and it is READY only while it holds the pool's weights (`weight_sync.py`).
  Tokens that a replica sampled with other weights, because it restarted unnoticed, are not handed out;
- every failure is handed out and ends its sample's request: the caller decides when the sample is submitted again, the
  pool decides on which replica. A request that failed on a replica that is well keeps its kind of failure; all samples
  of a replica that is lost fail as `Fault.LOST`, after every token that the replica had streamed;
- no sample is submitted to replicas that sleep (`device_turns.py`);
- after `interrupt`, nothing runs on any replica. Only recoveries of lost replicas continue, until `close`.

    submit ──> waiting ──> on a replica ──finished──────────────────────────────────> handed out
                             │   └──failed──> held back ──the replica is well───────> failure handed out
                             │                   └──────────the replica is lost──┐
                             └──the replica is lost──────────────────────────────┴──> LOST handed out
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from april.engines.chunk_queue import ChunkQueue
from april.engines.device_turns import DeviceTurns, TurnState
from april.engines.member import Member, ReplicaState, Request
from april.engines.replica import Replica, SleepingReplica, replica_of
from april.engines.routing import Router
from april.engines.weight_sync import WeightSync
from april.rollout.engine import Capacity, Chunk, Engine, EngineError, Fault
from april.rollout.patience import patient_timeout
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)


class EnginePool:
    """Replicas behind one `Engine`.

    Health checks run while samples are in flight. A replica is lost if it does not answer a health check, fails too
    large a share of its requests, or no longer holds the weights that it was given. It is brought back in the
    background, and gets the current weights before it gets work.

    Args:
        engines: engines for the same model with the same settings. An engine that is no `Replica` is assumed to live as
            long as this process.
        health_interval: seconds between health checks while samples are in flight.
        health_timeout: seconds that a health check may take.
        update_timeout: seconds that a replica may take to load weights.
        max_failure_share: share of its latest requests (about 100) that may fail before a replica is lost.
        min_failures: number of failures below which the share does not count.
        affinity: how much more load, as a share of its slots, a replica may have and still be given the samples whose
            prefixes it caches.
        patience: seconds without any ready replica, in a step or before an update, after which the pool fails.
        backlog: chunks kept for a slow reader before replicas are no longer polled (back-pressure).
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
        self._weight_sync = WeightSync(self.members, self._on_recovery, health_timeout, update_timeout, patience)
        self._router: Router[Member] = Router(affinity)
        self._health_interval = health_interval
        self._health_timeout = health_timeout
        self._failing = (max_failure_share, min_failures)
        self._patience = patience
        self.turns = DeviceTurns()
        self._waiting: dict[str, Sample] = {}
        """Samples that no ready replica was there for."""
        self._interrupting: set[str] = set()
        """Samples that an `interrupt` is stopping: their failures are not handed out, and no replica gets them."""
        self._queue = ChunkQueue(backlog)
        self._error: Exception | None = None
        """Raised by the next `poll`: the failure of the pool, or an unexpected exception of a replica."""
        self._failure: EngineError | None = None
        """The failure of the pool, from `fail`."""
        self._failed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._losses: set[asyncio.Task[None]] = set()
        """Tasks that hand out the samples of lost replicas as LOST."""

    def add(self, engine: Engine) -> None:
        """Add a replica. It gets the current weights in the background, and then work."""
        member = Member(
            replica_of(engine, len(self.members)), state=ReplicaState.LOST, reason="it has not been started yet"
        )
        self.members.append(member)
        self._weight_sync.recover(member)

    def wake(self) -> None:
        """Try at once to bring lost replicas back: something has changed that they may have waited for."""
        self._weight_sync.wake()

    def fail(self, reason: EngineError) -> None:
        """Make the pool fail: the next `poll`, and an update that is waiting, raise `reason`."""
        self._error = self._failure = reason
        self._failed.set()
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

    @property
    def _in_flight(self) -> bool:
        return bool(self._waiting or self._losses or any(member.samples or member.failed for member in self.members))

    @property
    def _places(self) -> list[dict[str, Any]]:
        """All places that a sample in flight can be in."""
        return [self._waiting, *(place for member in self.members for place in (member.samples, member.failed))]

    def submit(self, sample: Sample) -> None:
        assert self.turns.serving, f"the pool is {self.turns.state.value}: it takes no samples"
        self._place(sample)
        if self._watch is None:
            self._watch = asyncio.create_task(self._check_health(), name="pool health")

    def _place(self, sample: Sample) -> None:
        """Submit a sample to a replica, or let it wait for one."""
        member = self._router.choose(sample.id, self._ready)
        if member is None:
            self._waiting[sample.id] = sample
            return
        # First, because the replica may refuse the sample (ValueError): it must not count as in flight then.
        member.replica.submit(sample)
        member.samples[sample.id] = Request.of(sample)
        member.given += 1
        member.failures.began()
        if (previous := self._router.place(sample.id, member)) is not None:
            previous.replica.forget([sample.id])
        self._start_polling(member)

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._in_flight:
            self._weight_sync.require_recoverable()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            try:
                # Health checks and the replicas' own limits end a wait while a replica is ready.
                async with patient_timeout(None if self._ready else self._patience):
                    await self._queue.ready()
            except TimeoutError:
                problems = self._weight_sync.problems()
                raise EngineError(f"no replica was ready for {self._patience:g} s: {problems}") from None
        return self._queue.take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        named = None if sample_ids is None else set(sample_ids)
        stopping = {id for place in self._places for id in place if named is None or id in named}
        self._interrupting |= stopping
        try:
            await asyncio.gather(*(self._interrupt(member, stopping) for member in self._ready))
            while self._losses:  # the last tokens of a lost replica may still arrive
                await asyncio.wait(self._losses)
        except asyncio.CancelledError:
            # A sample may still run on its replica: it stays in flight there, so that the next interrupt stops it.
            for member in self._ready:
                if not stopping.issuperset(member.samples):
                    self._start_polling(member)
            raise
        else:
            for place in self._places:
                for id in stopping.intersection(place):
                    del place[id]
            if not self._in_flight:
                await _cancel([self._watch])
                self._watch = None
        finally:
            self._interrupting -= stopping
        self._queue.wake()
        return self._queue.take(named)

    async def _interrupt(self, member: Member, sample_ids: Container[str]) -> None:
        """Stop the named samples that are on this replica."""
        stopping = [id for id in member.samples if id in sample_ids]
        if not stopping:
            return
        # A poll that returns no chunks while its samples are being stopped would count as a lost replica.
        await _cancel([member.polling])
        try:
            for chunk in await member.replica.interrupt(stopping):
                self._forward(member, chunk)
        except EngineError as error:
            self._lose(member, str(error))
        else:
            for id in stopping:
                member.samples.pop(id, None)
            if member.samples and member.ready:
                self._start_polling(member)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Update all replicas to policy `version` together.

        A replica that is lost, or dies during the update, gets the weights when it is back. If all replicas are lost,
        the update waits up to `patience` for the first one to come back.

        Raises:
            ValueError: there are no such weights; nothing has changed.
            EngineError: no replica came back, or a replica failed to load the weights, which the message names. The
                pool keeps its version: the other replicas get their former weights back before they get work, and the
                update may be tried again. Or the pool has failed.
        """
        with self.turns.updating():
            await self._unless_failed(self._weight_sync.update_all(version, weights))
        # The caches hold no prefixes of the new weights, so a home has no advantage any more.
        if self.members[0].replica.on_update != "keep":
            self._router.forget_homes()

    async def sleep(self) -> None:
        """Put all replicas to sleep (see `SleepingEngine`). Replicas that fail are killed, and started again later."""
        with self.turns.to(TurnState.INTERRUPTED):
            chunks = await self.interrupt()
            assert not chunks, "tokens were not taken before the engine was put to sleep"
        with self.turns.to(TurnState.ASLEEP):
            await self._weight_sync.sleep()

    async def wake_weights(self) -> None:
        with self.turns.to(TurnState.WEIGHTS_AWAKE):
            await self._weight_sync.wake_weights()

    async def wake_kv_cache(self) -> None:
        with self.turns.to(TurnState.SERVING):
            await self._weight_sync.wake_kv_cache()

    async def restarted(self) -> None:
        """Wait until a replica was started again, after a `NoReplicaError`: the pool can then be put to sleep again."""
        await self._weight_sync.restarted()
        self.turns.restarted()

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that are ready."""
        return [member.replica for member in self._ready]

    def verify_with(self, verify: Callable[[SleepingReplica], Awaitable[None]]) -> None:
        """Call `verify` with each replica that serves with new weights, before it gets work.

        Args:
            verify: raises EngineError if the replica computes another policy.
        """
        self._weight_sync.verify = verify

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, and cancel it once the pool fails."""
        working, failing = asyncio.create_task(work), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait((working, failing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failing.cancel()
            await _cancel([working])
        if working.cancelled() and self._failure is not None:
            raise self._failure
        working.result()

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        names = None if sample_ids is None else list(sample_ids)
        self._router.forget(names)
        for member in self.members:
            member.replica.forget(names)

    async def close(self) -> None:
        tasks = [task for member in self.members for task in (member.polling, member.check, member.recovery)]
        await _cancel([self._watch, *tasks, *self._losses])
        await asyncio.gather(*(member.replica.close() for member in self.members))

    def _start_polling(self, member: Member) -> None:
        if member.polling is None or member.polling.done():
            member.polling = asyncio.create_task(self._poll(member), name=f"poll {member.name}")

    async def _poll(self, member: Member) -> None:
        """Forward the chunks of a replica while samples are on it."""
        while member.samples:
            try:
                chunks = await member.replica.poll()
            except EngineError as error:
                self._lose(member, str(error))
                return
            except Exception as unexpected:  # a defect of the engine: the caller gets it, as from the engine alone
                self._error = unexpected
                self._queue.wake()
                return
            for chunk in chunks:
                self._forward(member, chunk)
            # `Engine.poll` returns nothing only if no sample is in flight, so the replica does not know these samples.
            if not chunks and member.samples:
                self._lose(member, f"it lost track of {len(member.samples)} samples")
                return
            if self._queue.full:
                await self._queue.space()

    def _forward(self, member: Member, chunk: Chunk) -> None:
        """Queue the tokens of a chunk for the caller, and end its request if the chunk does."""
        id = chunk.sample_id
        request = member.samples.get(id)
        # The request has ended already, for example because it was stopped: late tokens are dropped.
        if request is None:
            return
        if not self._has_current_weights(member, request, chunk):
            self._lose(member, f"tokens of policy version {chunk.version} came where it was given {self.version}")
            self._fail(member, [id])  # at once: its later chunks would leave a gap
            return
        if chunk.token_ids or chunk.finish is not None:
            self._router.token_arrived(id)
            self._queue.put(chunk if chunk.error is None else chunk._replace(error=None))
        elif chunk.routes is not None:
            self._queue.put(chunk._replace(error=None))
        if chunk.finish is not None:
            del member.samples[id]
            if not (request.multi_turn and chunk.finish is FinishReason.STOP):  # else its prefix is needed again
                self._router.forget([id])
        elif chunk.error is not None:
            del member.samples[id]
            self._hold_back(member, chunk)

    def _has_current_weights(self, member: Member, request: Request, chunk: Chunk) -> bool:
        """Return whether tokens come from the weights that the replica was given, if it was given any.

        With "keep", tokens that were sampled before an interrupt may arrive when their sample is resumed.
        """
        if chunk.version == self.version or not chunk.token_ids or not self._weight_sync.updated:
            return True
        return member.replica.on_update == "keep" and request.resumed

    def _hold_back(self, member: Member, failure: Chunk) -> None:
        """Hold back the failure of a request until a health check of its replica."""
        id = failure.sample_id
        if id in self._interrupting:
            return
        log.info("%s: a request for sample %s failed: %s", member.name, id, failure.error)
        self._router.request_failed(id, member)
        member.failed[id] = failure
        member.failures.failed()
        if member.failures.reaches(*self._failing):
            self._lose(member, f"{member.failures}, the last with: {failure.error}")
        elif member.check is None or member.check.done():
            member.check = asyncio.create_task(self._check(member), name=f"check {member.name}")

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(self._health_interval)
            await asyncio.gather(*(self._check(member) for member in self._ready))

    async def _check(self, member: Member) -> None:
        """Lose a replica that is not well, or hand out the failures that were held back."""
        while member.ready:
            # A copy: the check proves nothing about failures that arrive while it runs.
            failed = dict(member.failed)
            if (problem := await member.health_problem(self._health_timeout)) is not None:
                self._lose(member, problem)
                return
            self._hand_out(member, failed)
            if not member.failed:  # else a request has failed during the check
                return

    def _hand_out(self, member: Member, failed: Mapping[str, Chunk]) -> None:
        for id, failure in failed.items():
            if member.failed.pop(id, None) is not None:
                error = failure.error or ""
                named = error if error.startswith(member.name) else f"{member.name}: {error}"
                self._queue.put(Chunk(id, (), (), self.version, error=named, fault=failure.fault))

    def _lose(self, member: Member, reason: str) -> None:
        """Give a replica no more work, fail its samples, and bring it back in the background."""
        if not member.ready:
            return
        member.become(ReplicaState.LOST, reason)
        task = asyncio.create_task(self._fail_all(member), name=f"lose {member.name}")
        self._losses.add(task)
        task.add_done_callback(self._loss_ended)

    def _loss_ended(self, task: asyncio.Task[None]) -> None:
        self._losses.discard(task)
        self._queue.wake()

    async def _fail_all(self, member: Member) -> None:
        """Forward what a lost replica had streamed; then fail all its samples."""
        await _cancel([member.polling])
        with suppress(EngineError, TimeoutError):
            async with patient_timeout(self._health_timeout):
                for chunk in await member.replica.abandon():
                    # Failures of single requests are dropped here: all samples fail as LOST below.
                    self._forward(member, chunk._replace(error=None))
        self._fail(member, [*member.samples, *member.failed])
        self._weight_sync.recover(member)
        if not self._ready:
            log.warning("no replica is ready; all samples wait for at most %g s (outage_limit)", self._patience)

    def _fail(self, member: Member, sample_ids: Sequence[str]) -> None:
        """Hand out samples of a lost replica as failed. No retry is charged to a sample for `Fault.LOST`."""
        self._router.forget(sample_ids)
        for id in sample_ids:
            member.samples.pop(id, None)
            member.failed.pop(id, None)
            if id not in self._interrupting:
                lost = f"{member.name} was lost: {member.reason}"
                self._queue.put(Chunk(id, (), (), self.version, error=lost, fault=Fault.LOST))

    def _on_recovery(self) -> None:
        """Place the samples that wait: a replica is ready again, or none will ever be, which the next `poll` finds."""
        self._queue.wake()
        # Swapped before the loop: `_place` puts samples back if no replica is ready.
        waiting, self._waiting = self._waiting, {}
        for id, sample in waiting.items():
            if id in self._interrupting:
                continue
            try:
                self._place(sample)
            except ValueError as error:
                self._queue.put(Chunk(id, (), (), self.version, error=str(error), fault=Fault.REFUSED))


async def _cancel(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancel tasks and wait for their ends."""
    alive: list[Awaitable[None]] = []
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            alive.append(task)
    await asyncio.gather(*alive, return_exceptions=True)
