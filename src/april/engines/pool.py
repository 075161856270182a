"""Many replicas as one engine.

Invariants:
- a sample in flight is in exactly one place: on one replica, being moved, or waiting for a replica to be ready;
- the pool follows every token it hands out in a copy of the sample, so a sample goes on elsewhere from the last token
  that any replica streamed, whether or not it has been polled;
- a replica gets work only while it is ready, and it is ready only while it holds the current weights;
- after `interrupt` no replica runs anything; only attempts to bring lost replicas back outlive it, until `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from april.engines.chunk_queue import ChunkQueue
from april.engines.replica import ReplicaGoneError
from april.rollout.engine import Capacity, Chunk, Engine, EngineError
from april.rollout.trajectory import Sample, Segment

log = logging.getLogger(__name__)


class State(Enum):
    READY = "ready"
    LOST = "lost"
    """Dead, hung, failing or restarted; attempts are made to bring it back."""
    GONE = "gone"
    """Dead, and nobody starts it again."""
    TORN = "torn"
    """An update failed, here or elsewhere, so the weights it holds may not be the pool's."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of the pool. `samples` are those in flight on it, as the pool has followed them."""

    engine: Engine
    samples: dict[str, Sample] = field(default_factory=dict)
    state: State = State.READY
    reason: str = ""
    failures: int = 0
    """Requests in a row that failed, with no token from the replica between them."""
    pump: asyncio.Task[None] | None = None
    revival: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def load(self) -> float:
        """Samples in flight, as a share of what decodes together."""
        return len(self.samples) / self.engine.capacity.slots


class EnginePool:
    """Replicas behind one `Engine`.

    A new sample goes to the replica with the least load; a resumed one to where it was, if its prefix may still be
    cached there and the load is not much more. A replica is asked after its health, if it has a `check` method as
    server engines do; one that does not answer, that fails request after request, or that no longer holds the weights
    it was given is lost: its samples go on elsewhere. It is brought back in the background, and gets the current
    weights before it gets work.

    Args:
        replicas: engines of one model with the same settings.
        health_interval: seconds between health checks while samples are in flight.
        health_timeout: seconds a health check may take.
        update_timeout: seconds a replica may take to take up weights.
        max_failures: requests in a row that may fail before a replica is lost.
        max_retries: requests in a row that may fail for one sample, on whichever replicas, before the failure is
            handed on.
        affinity: how much more load, as a share of its slots, a replica may have and still be given back the samples
            whose prefixes it holds.
        patience: seconds to wait with no replica ready, in a step or before an update, before the pool itself fails.
        backlog: chunks kept for a slow reader before replicas are left unread.
    """

    def __init__(
        self,
        replicas: Sequence[Engine],
        *,
        health_interval: float = 5.0,
        health_timeout: float = 15.0,
        update_timeout: float = 900.0,
        max_failures: int = 5,
        max_retries: int = 5,
        affinity: float = 0.25,
        patience: float = 600.0,
        backlog: int = 4096,
    ) -> None:
        if not replicas:
            raise ValueError("a pool needs at least one replica")
        self.replicas = [Replica(engine) for engine in replicas]
        self.version = 0
        self._weights: Any = None
        self._updated = False
        """Replicas hold weights that they were given, if only by name: an engine may share the trainer's own."""
        self._health_interval = health_interval
        self._health_timeout = health_timeout
        self._update_timeout = update_timeout
        self._max_failures = max_failures
        self._max_retries = max_retries
        self._affinity = affinity
        self._patience = patience
        self._waiting: dict[str, Sample] = {}
        self._home: dict[str, Replica] = {}
        self._attempts: dict[str, int] = {}
        self._queue = ChunkQueue(backlog)
        self._updating = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._moves: set[asyncio.Task[None]] = set()
        self._delayed: set[asyncio.Task[None]] = set()
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def capacity(self) -> Capacity:
        each = [replica.engine.capacity for replica in self.replicas]
        kv_tokens = [capacity.kv_tokens for capacity in each if capacity.kv_tokens is not None]
        return Capacity(
            slots=sum(capacity.slots for capacity in each),
            context_length=min(capacity.context_length for capacity in each),
            kv_tokens=sum(kv_tokens) if len(kv_tokens) == len(each) else None,
        )

    @property
    def running(self) -> int:
        return sum(replica.engine.running for replica in self.replicas if replica.ready)

    def submit(self, sample: Sample) -> None:
        segments = [Segment(s.version, list(s.token_ids), list(s.logprobs)) for s in sample.segments]
        copy = Sample(
            sample.group_id,
            sample.index,
            sample.prompt_ids,
            sample.sampling,
            sample.seed,
            segments,
            length=sample.length,
        )
        self._place(copy)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_health(), name="pool health")

    def _place(self, sample: Sample, elsewhere_than: Replica | None = None) -> None:
        """Give a sample to a replica, or let it wait for one."""
        replica = self._route(sample, elsewhere_than)
        if replica is None:
            self._waiting[sample.id] = sample
            return
        home = self._home.get(sample.id)
        if home is not None and home is not replica:
            home.engine.forget([sample.id])
        replica.engine.submit(sample)
        replica.samples[sample.id] = sample
        self._home[sample.id] = replica
        if replica.pump is None or replica.pump.done():
            replica.pump = asyncio.create_task(self._pump(replica), name=f"pump {replica.engine!r}")

    def _route(self, sample: Sample, elsewhere_than: Replica | None) -> Replica | None:
        ready = [replica for replica in self.replicas if replica.ready]
        others = [replica for replica in ready if replica is not elsewhere_than] or ready
        if not others:
            return None
        best = min(others, key=lambda replica: replica.load)
        home = self._home.get(sample.id)
        return home if home in others and home.load <= best.load + self._affinity else best

    async def poll(self) -> list[Chunk]:
        while not self._queue and self._in_flight:
            self._require_hope()
            stranded = not any(replica.ready for replica in self.replicas)
            try:
                async with asyncio.timeout(self._patience if stranded else None):
                    await self._queue.ready()
            except TimeoutError:
                raise EngineError(f"no replica was ready for {self._patience:g} s: {self._reasons()}") from None
        return self._queue.take()

    @property
    def _in_flight(self) -> bool:
        return bool(self._waiting or self._delayed or self._moves or any(replica.samples for replica in self.replicas))

    async def interrupt(self) -> list[Chunk]:
        try:
            with self._queue.drain():
                pumps = (replica.pump for replica in self.replicas if replica.ready)
                await self._stop([self._watch, *self._delayed, *pumps])
                self._watch = None
                await asyncio.gather(*(self._interrupt(replica) for replica in self.replicas if replica.ready))
                while self._moves:
                    await asyncio.wait(self._moves)
        finally:
            for replica in self.replicas:
                replica.samples.clear()
            self._waiting.clear()
        return self._queue.take()

    async def _interrupt(self, replica: Replica) -> None:
        if not replica.samples:
            return
        try:
            for chunk in await replica.engine.interrupt():
                self._forward(replica, chunk)
        except EngineError as error:
            self._lose(replica, str(error))

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Have all replicas go over to policy `version` together.

        A replica that is lost, or found to be, gets the weights when it comes back. If all are, the first to come back
        within `patience` is waited for.

        Raises:
            ValueError: there are no weights there; nothing has changed.
            EngineError: no replica came back, or one failed to take the weights up, and the message names it. The pool
                stays at its version: the other replicas are given their former weights back before they get work, and
                the update may be tried again.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while not await self._all_go_over(version, weights):
            self._require_hope()
            if loop.time() >= until:
                raise EngineError(
                    f"weights {version}: no replica was ready for {self._patience:g} s: {self._reasons()}"
                )
            await asyncio.sleep(min(0.5, self._patience))

    async def _all_go_over(self, version: int, weights: Any) -> bool:
        """Whether there was a replica to go over."""
        async with self._updating:
            await asyncio.gather(*(self._find_out(replica) for replica in self.replicas))
            targets = [replica for replica in self.replicas if replica.state not in (State.LOST, State.GONE)]
            if not targets:
                return False
            results = await asyncio.gather(
                *(self._give(replica, version, weights) for replica in targets), return_exceptions=True
            )
            for error in results:
                if isinstance(error, ValueError):
                    raise error
            errors = [(r, e) for r, e in zip(targets, results, strict=True) if isinstance(e, BaseException)]
            if not errors:
                self.version, self._weights, self._updated = version, weights, True
                for replica in targets:
                    replica.state, replica.failures = State.READY, 0
                if getattr(targets[0].engine, "on_update", "recompute") == "recompute":
                    self._home.clear()
                return True
            for replica in targets:
                replica.state, replica.reason = State.TORN, f"the update to version {version} failed"
                if self._updated:
                    self._bring_back(replica)
        failed = "; ".join(f"{replica.engine!r}: {error}" for replica, error in errors)
        raise EngineError(f"not all replicas took up weights {version}; failed: {failed}") from errors[0][1]

    async def _find_out(self, replica: Replica) -> None:
        """See which replicas an update can count on: those that are ready, or torn and alive."""
        if replica.ready:
            await self._check(replica)
        elif replica.state is State.TORN:
            try:
                await self._learn(replica)
            except (EngineError, TimeoutError) as error:
                replica.state, replica.reason = State.LOST, str(error) or type(error).__name__
                self._bring_back(replica)

    async def _learn(self, replica: Replica) -> None:
        if (learn := getattr(replica.engine, "learn", None)) is not None:
            async with asyncio.timeout(self._health_timeout):
                await learn()

    async def _give(self, replica: Replica, version: int, weights: Any) -> None:
        try:
            async with asyncio.timeout(self._update_timeout):
                await replica.engine.update_weights(version, weights)
        except TimeoutError:
            raise EngineError(f"it took longer than {self._update_timeout:g} s") from None

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        names = list(self._home) if sample_ids is None else list(sample_ids)
        for name in names:
            self._home.pop(name, None)
        for name in list(self._attempts) if sample_ids is None else names:
            self._attempts.pop(name, None)
        for replica in self.replicas:
            replica.engine.forget(None if sample_ids is None else names)

    async def close(self) -> None:
        own = [task for replica in self.replicas for task in (replica.pump, replica.revival)]
        await self._stop([self._watch, *own, *self._moves, *self._delayed, *self._checks])
        await asyncio.gather(*(replica.engine.close() for replica in self.replicas))

    async def _pump(self, replica: Replica) -> None:
        """Hand on what a replica samples, as long as it has samples."""
        while replica.samples:
            try:
                chunks = await replica.engine.poll()
            except EngineError as error:
                self._lose(replica, str(error))
                return
            for chunk in chunks:
                self._forward(replica, chunk)
            if not chunks and replica.samples:
                self._lose(replica, f"it lost track of {len(replica.samples)} samples")
                return
            if self._queue.full:
                await self._queue.space()

    def _forward(self, replica: Replica, chunk: Chunk) -> None:
        sample = replica.samples.get(chunk.sample_id)
        if sample is None:
            return
        error = chunk.error
        try:
            sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
        except ValueError as nonsense:
            self._lose(replica, f"it answered nonsense: {nonsense}")
            return
        else:
            if chunk.token_ids:
                replica.failures = 0
                self._attempts.pop(sample.id, None)
            if chunk.token_ids or chunk.finish is not None:
                self._queue.put(chunk._replace(error=None))
        if sample.finish is not None:
            del replica.samples[sample.id]
            self._home.pop(sample.id, None)
        elif error is not None:
            del replica.samples[sample.id]
            self._retry(replica, sample, error)

    def _retry(self, replica: Replica, sample: Sample, error: str) -> None:
        """A request failed: the sample goes on, elsewhere if there is another replica; the replica is looked at."""
        if self._queue.draining:
            return
        replica.failures += 1
        attempts = self._attempts[sample.id] = self._attempts.get(sample.id, 0) + 1
        log.warning("%r: a request for sample %s failed: %s", replica.engine, sample.id, error)
        if replica.failures >= self._max_failures:
            self._lose(replica, f"{replica.failures} requests in a row failed, the last with: {error}")
        elif replica.failures == 1:
            self._begin(self._check(replica), self._checks)
        if attempts > self._max_retries:
            self._attempts.pop(sample.id)
            self._queue.put(Chunk(sample.id, (), (), self.version, error=error))
        else:
            self._begin(self._move(sample, replica, 0.05 * 2**attempts), self._delayed)

    async def _move(self, sample: Sample, source: Replica, delay: float) -> None:
        """Put a sample on another replica. It waits a little first: what failed may fail at once again."""
        await asyncio.sleep(delay)
        self._place_or_fail(sample, source)

    def _place_or_fail(self, sample: Sample, elsewhere_than: Replica | None = None) -> None:
        try:
            self._place(sample, elsewhere_than)
        except ValueError as error:
            self._queue.put(Chunk(sample.id, (), (), self.version, error=str(error)))

    def _lose(self, replica: Replica, reason: str) -> None:
        """Take a replica out, its samples elsewhere, and try to bring it back."""
        if not replica.ready:
            return
        log.warning("%r is lost: %s", replica.engine, reason)
        replica.state, replica.reason = State.LOST, reason
        self._begin(self._salvage(replica), self._moves)

    async def _salvage(self, replica: Replica) -> None:
        """Take over what a lost replica had streamed, and everything it had not finished."""
        if replica.pump is not None and replica.pump is not asyncio.current_task():
            await self._stop([replica.pump])
        engine = replica.engine
        abandon = getattr(engine, "abandon", engine.interrupt)
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._health_timeout):
                for chunk in await abandon():
                    self._forward(replica, chunk._replace(error=None))
        samples, replica.samples = list(replica.samples.values()), {}
        for sample in samples:
            self._home.pop(sample.id, None)
            if not self._queue.draining:
                self._place_or_fail(sample)
        self._bring_back(replica)

    def _bring_back(self, replica: Replica) -> None:
        if replica.revival is None or replica.revival.done():
            replica.revival = asyncio.create_task(self._revive(replica), name=f"revive {replica.engine!r}")

    async def _revive(self, replica: Replica) -> None:
        """Bring a replica back: when it answers again, it gets the current weights, and then work."""
        delay = 0.5
        while not replica.ready:
            await asyncio.sleep(delay)
            delay = min(2 * delay, 30.0)
            async with self._updating:
                if replica.ready:
                    return
                try:
                    await self._learn(replica)
                    if self._updated:
                        await self._give(replica, self.version, self._weights)
                except ReplicaGoneError as error:
                    replica.state, replica.reason = State.GONE, str(error)
                    self._queue.wake()
                    return
                except (EngineError, ValueError, TimeoutError) as error:
                    replica.reason = str(error) or type(error).__name__
                    continue
                log.warning("%r is back, with weights %d", replica.engine, self.version)
                replica.state, replica.failures = State.READY, 0
            self._queue.wake()
            waiting, self._waiting = self._waiting, {}
            for sample in waiting.values():
                self._place_or_fail(sample)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._health_interval)
            ready = [replica for replica in self.replicas if replica.ready]
            await asyncio.gather(*(self._check(replica) for replica in ready))

    async def _check(self, replica: Replica) -> None:
        check = getattr(replica.engine, "check", None)
        if check is None:
            return
        try:
            async with asyncio.timeout(self._health_timeout):
                await check()
        except EngineError as error:
            self._lose(replica, str(error))
        except TimeoutError:
            self._lose(replica, f"no answer to a health check in {self._health_timeout:g} s")

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._queue.wake()

        task.add_done_callback(ended)

    async def _stop(self, tasks: Iterable[asyncio.Task[None] | None]) -> None:
        alive: list[Awaitable[None]] = []
        for task in tasks:
            if task is not None and not task.done():
                task.cancel()
                alive.append(task)
        await asyncio.gather(*alive, return_exceptions=True)

    def _require_hope(self) -> None:
        if all(replica.state is State.GONE for replica in self.replicas):
            raise EngineError(f"no replica is left: {self._reasons()}")

    def _reasons(self) -> str:
        return "; ".join(f"{replica.engine!r}: {replica.reason}" for replica in self.replicas if not replica.ready)
