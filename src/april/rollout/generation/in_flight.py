"""Samples that an engine has, and the wait for their results. Several users may share one engine.

Invariants:
- a chunk that the engine has returned is never lost, even if the wait for it is cancelled at that moment;
- one user at a time polls the engine, for all of them, and no user waits on for chunks that another one has received;
- each chunk goes to the user with its sample in flight; a chunk of an unknown sample goes to the rollouts, which report
  it;
- a sample that the engine refuses fails alone, as a request that it refuses later does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from april.rollout.engine import Chunk, Engine, Fault
from april.rollout.generation.stopping_engine import StoppingEngine
from april.rollout.request_interval import RequestInterval, RequestOutcome
from april.rollout.sampling import SamplingParams
from april.rollout.stop_strings import Decode
from april.rollout.trajectory.sample import Sample

Wait = Callable[[], Coroutine[Any, Any, None]]


class InFlight:
    """The samples of one user that are in the engine, by id, each with the interval of its request."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self._undelivered: list[Chunk] = []
        """Chunks that came as a wait was cancelled, or while another user polled, and refusals of samples."""

    def __len__(self) -> int:
        return len(self.samples)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self.samples

    def submit(self, engine: Engine, samples: Iterable[Sample], now: float, intervals: list[RequestInterval]) -> None:
        """Submit samples, and append the intervals of their requests to `intervals`."""
        submit, in_flight = engine.submit, self.samples
        for sample in samples:
            id = sample.id
            assert id not in in_flight, "a sample is in the engine once"
            try:
                submit(sample)
            except ValueError as error:
                self._undelivered.append(Chunk(id, (), (), -1, error=str(error), fault=Fault.REFUSED))
            in_flight[id] = sample
            tokens = sample.length - sample.environment_tokens
            sample.request = interval = RequestInterval(id, sample.group_id, now, tokens)
            intervals.append(interval)

    def mark_started(self, samples: Iterable[Sample], now: float) -> None:
        """Record the time at which the first tokens of these samples' requests came."""
        for sample in samples:
            request = sample.request
            assert request is not None
            request.queued = now - request.start

    def end(self, samples: Iterable[Sample], now: float, outcome: RequestOutcome) -> None:
        """End the requests of these samples."""
        in_flight = self.samples
        for sample in samples:
            del in_flight[sample.id]
            request, sample.request = sample.request, None
            assert request is not None
            request.end, request.after = now, sample.length - sample.environment_tokens
            request.outcome = outcome

    def end_all(self, now: float) -> None:
        self.end(list(self.samples.values()), now, "interrupted")

    def start_step(self, now: float) -> list[RequestInterval]:
        """Split the intervals of all samples in flight at the end of a step; return the intervals of the next step."""
        carried = []
        for id, sample in self.samples.items():
            interval = sample.request
            assert interval is not None
            running = interval.queued is not None or interval.running
            interval.end, interval.after = now, sample.policy_tokens
            interval.outcome = "running" if running else "interrupted"
            # `queued` will be the time of the first token in the next step.
            sample.request = RequestInterval(id, sample.group_id, 0.0, sample.policy_tokens, running=running)
            carried.append(sample.request)
        return carried

    async def interrupt(self, engine: Engine, controls: Sequence[str] = ()) -> list[Chunk]:
        """Stop these samples and no others; return the tokens sampled for them that were not delivered yet.

        Args:
            controls: samples of control requests, which are stopped too; their tokens are thrown away.
        """
        interrupted = await engine.interrupt([*self.samples, *controls])
        # After the wait: another user may have delivered chunks during it, and they precede the interrupt's chunks.
        if controls:
            interrupted = [chunk for chunk in interrupted if chunk.sample_id not in controls]
        return [*self.undelivered(), *interrupted]

    def undelivered(self) -> list[Chunk]:
        """Return the chunks that there are for these samples and `poll` has not returned, once."""
        chunks, self._undelivered = self._undelivered, []
        return chunks

    def deliver(self, chunks: Iterable[Chunk]) -> None:
        """Keep chunks of these samples, which another user has received, for the next `poll`."""
        self._undelivered += chunks

    async def poll(
        self,
        ask: Callable[[], Coroutine[Any, Any, list[Chunk]]],
        timeout: float | None = None,
        or_until: Sequence[Wait] = (),
    ) -> list[Chunk]:
        """Return the next chunks from `ask`; none if `timeout` seconds pass or one of `or_until` ends."""
        if self._undelivered:
            return self.undelivered()
        if timeout is None and not or_until:
            return await ask()
        poll = asyncio.ensure_future(ask())
        first: set[asyncio.Future[Any]] = {poll, *(asyncio.ensure_future(wait()) for wait in or_until)}
        try:
            await asyncio.wait(first, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(first)
        except asyncio.CancelledError:
            await _cancel(first)
            # In front: chunks that another user has delivered since are newer.
            if not poll.cancelled() and poll.exception() is None:  # it ended at the same moment, with tokens
                self._undelivered[:0] = [chunk for chunk in poll.result() if chunk.sample_id in self.samples]
            raise
        return [] if poll.cancelled() else poll.result()


class SharedEngine:
    """An engine, and the users that have samples in it: the rollouts, evaluations and control requests.

    Args:
        engine: generates the samples.
        decode: text of token ids, for stop strings; None: no sample has any.

    Attributes:
        engine: the engine as its users call it, with stop strings.
        given: the same engine without them.
        rollouts: samples of the rollouts, the permanent user.
    """

    def __init__(self, engine: Engine, decode: Decode | None = None) -> None:
        self._decode = decode
        self.replace(engine)
        self.rollouts = InFlight()
        self._others: list[InFlight] = []
        self._polling = asyncio.Lock()

    def replace(self, engine: Engine) -> None:
        """Set the engine, while nothing is in flight."""
        self.given = engine
        self.engine: Engine = engine if self._decode is None else StoppingEngine(engine, self._decode)

    def take_behind_stops(self) -> int:
        """Return the number of tokens that the engine drew behind stop strings since the last call."""
        if not isinstance(self.engine, StoppingEngine):
            return 0
        tokens, self.engine.behind_stops = self.engine.behind_stops, 0
        return tokens

    def check(self, sampling: SamplingParams) -> None:
        """Check that the stop strings of sampling parameters can be found.

        Raises:
            ValueError: there is no `decode`.
        """
        if sampling.stop and self._decode is None:
            raise ValueError(f"stop = {sampling.stop!r}: stop strings need the scheduler's argument decode")

    def __len__(self) -> int:
        """Samples in flight, of all users."""
        return len(self.rollouts) + sum(map(len, self._others))

    @contextmanager
    def another_user(self) -> Iterator[InFlight]:
        """Add a user for the block, at whose end it must have no samples in the engine."""
        user = InFlight()
        self._others.append(user)
        try:
            yield user
        finally:
            self._others.remove(user)

    async def poll(self, user: InFlight, timeout: float | None = None, or_until: Sequence[Wait] = ()) -> list[Chunk]:
        """Return the next chunks of `user`: none if the engine returned chunks of other users only, `timeout` seconds
        have passed or one of `or_until` has ended."""
        return await user.poll(partial(self._poll, user), timeout, or_until)

    async def _poll(self, user: InFlight) -> list[Chunk]:
        async with self._polling:
            # The user that held the lock before may have received these chunks, and the engine may have no others.
            return user.undelivered() or self._deal(await self.engine.poll(), user)

    def _deal(self, chunks: list[Chunk], user: InFlight) -> list[Chunk]:
        """Return the chunks of `user`, and deliver the rest to their own users."""
        if not self._others:
            return chunks
        dealt: dict[InFlight, list[Chunk]] = {}
        for chunk in chunks:
            owner = next((other for other in self._others if chunk.sample_id in other.samples), self.rollouts)
            dealt.setdefault(owner, []).append(chunk)
        own = dealt.pop(user, [])
        for owner, theirs in dealt.items():
            owner.deliver(theirs)
        return own


async def first_of(waits: Sequence[Wait], timeout: float | None = None) -> None:
    """Wait until one of `waits` has ended, or `timeout` seconds have passed."""
    if not waits:
        assert timeout is not None, "there is nothing to wait for"
        await asyncio.sleep(timeout)
        return
    tasks: set[asyncio.Future[Any]] = {asyncio.ensure_future(wait()) for wait in waits}
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(tasks)


async def outlast(task: asyncio.Future[Any]) -> bool:
    """Wait until `task` has ended, even if the caller is cancelled; return whether it was."""
    cancelled = False
    while not task.done():
        try:
            # A cancelled `asyncio.wait` leaves the task running; awaiting the task itself would cancel it.
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def _cancel(tasks: set[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    # A task may finish with a result before its cancellation arrives, so callers look at it after this.
    await asyncio.wait(tasks)
