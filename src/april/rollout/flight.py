"""The samples that an engine holds, and the wait for what comes of them.

Invariant: a chunk that an engine has handed out is never lost, also if the wait for it is cancelled in that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal

from april.rollout.engine import Chunk, Engine
from april.rollout.step import Span
from april.rollout.trajectory import Group, Sample


class Flight:
    """The samples in flight, by name, each with its group and its stay in the engine."""

    def __init__(self) -> None:
        self.samples: dict[str, tuple[Sample, Group, Span]] = {}
        self._silent: dict[str, Span] = {}
        """The stays without a token so far."""
        self._late: list[Chunk] = []
        """Handed out in the moment in which a wait was cancelled, or to somebody else who waited."""

    def __len__(self) -> int:
        return len(self.samples)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self.samples

    def submit(self, engine: Engine, sample: Sample, group: Group, now: float) -> Span:
        engine.submit(sample)
        span = self._silent[sample.id] = Span(sample.id, group.id, now, sample.policy_tokens)
        self.samples[sample.id] = sample, group, span
        return span

    def begun(self, chunks: Sequence[Chunk], now: float) -> list[str]:
        """The samples whose first tokens since they were submitted are among `chunks`, by name."""
        silent = self._silent
        if not silent:
            return []
        begun = []
        for chunk in [chunk for chunk in chunks if chunk[0] in silent]:
            id, tokens = chunk[0], len(chunk[1])
            if tokens and (span := silent.pop(id, None)):
                span.queued, span.first_tokens = now - span.start, tokens
                begun.append(id)
        return begun

    def end(
        self, id: str, now: float, outcome: Literal["finished", "interrupted", "failed", "turn"]
    ) -> tuple[Sample, Group]:
        """A sample is in flight no longer."""
        self._silent.pop(id, None)
        sample, group, span = self.samples.pop(id)
        span.end, span.after, span.outcome = now, sample.policy_tokens, outcome
        return sample, group

    def end_all(self, now: float) -> None:
        for id in list(self.samples):
            self.end(id, now, "interrupted")

    def carry(self, now: float) -> list[Span]:
        """A step ends at `now` and everything stays in flight: its stays as those of the step that begins."""
        going_on = []
        for id, (sample, group, span) in self.samples.items():
            running = span.queued is not None or span.running
            span.end, span.after, span.outcome = now, sample.policy_tokens, "running" if running else "interrupted"
            self._silent[id] = carried = Span(id, group.id, 0.0, sample.policy_tokens, running=running)
            self.samples[id] = sample, group, carried
            going_on.append(carried)
        return going_on

    async def interrupt(self, engine: Engine) -> list[Chunk]:
        """Stop these samples, and no others that the engine holds; what was sampled for them and not absorbed yet."""
        interrupted = await engine.interrupt(list(self.samples))
        return [*self.late(), *interrupted]

    def late(self) -> list[Chunk]:
        """What was handed out for these samples and is not absorbed yet."""
        late, self._late = self._late, []
        return late

    def keep(self, chunks: Iterable[Chunk]) -> None:
        """Chunks of these samples that somebody else was handed: they come out next."""
        self._late += chunks

    async def poll(
        self,
        ask: Callable[[], Coroutine[Any, Any, list[Chunk]]],
        timeout: float | None = None,
        or_until: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> list[Chunk]:
        """What the engine sampled next, which `ask` waits for, or nothing if `timeout` seconds or the end of one of
        `or_until` came first."""
        if self._late:
            return self.late()
        if timeout is None and not or_until:
            return await ask()
        poll = asyncio.ensure_future(ask())
        first: set[asyncio.Future[Any]] = {poll, *(asyncio.ensure_future(wait()) for wait in or_until)}
        try:
            await asyncio.wait(first, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            await _end(first)
        except asyncio.CancelledError:
            await _end(first)
            if not poll.cancelled() and poll.exception() is None:  # it ended in the same moment, with tokens
                self._late[:0] = [chunk for chunk in poll.result() if chunk.sample_id in self.samples]
            raise
        return [] if poll.cancelled() else poll.result()


async def first_of(waits: Sequence[Callable[[], Coroutine[Any, Any, None]]], timeout: float | None = None) -> None:
    """Until one of `waits` is over, or `timeout` seconds are."""
    tasks: set[asyncio.Future[Any]] = {asyncio.ensure_future(wait()) for wait in waits}
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(tasks)


async def outlast(task: asyncio.Future[Any]) -> bool:
    """Wait until `task` is over, whatever comes; whether the caller was cancelled meanwhile, and has to say so."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def _end(tasks: set[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
