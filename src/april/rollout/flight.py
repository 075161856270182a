"""The samples that an engine holds, and the wait for what comes of them.

Invariant: a chunk that an engine has handed out is never lost, also if the wait for it is cancelled in that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal

from april.rollout.batch import RequestInterval
from april.rollout.engine import Chunk, Engine
from april.rollout.trajectory import Sample


class Flight:
    """The samples in flight, by name, and the account of their stays in the engine."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self._silent: dict[str, RequestInterval] = {}
        """The stays without a token so far."""
        self._sampling: dict[str, RequestInterval] = {}
        """The others."""
        self._late: list[Chunk] = []
        """Handed out in the moment in which a wait was cancelled, or to somebody else who waited."""

    def __len__(self) -> int:
        return len(self.samples)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self.samples

    def submit(self, engine: Engine, work: Iterable[Sample], now: float, spans: list[RequestInterval]) -> None:
        """Submit samples, and append their stays to `spans`."""
        submit, samples, silent = engine.submit, self.samples, self._silent
        for sample in work:
            id = sample.id
            assert id not in samples, "a sample is in the engine once"
            submit(sample)
            samples[id] = sample
            silent[id] = span = RequestInterval(id, sample.group_id, now, sample.length - sample.environment_tokens)
            spans.append(span)

    def begun(self, chunks: Sequence[Chunk], now: float) -> list[str]:
        """The samples whose first tokens since they were submitted are among `chunks`, by name."""
        silent, sampling = self._silent, self._sampling
        if not silent:
            return []
        begun = []
        for chunk in [chunk for chunk in chunks if chunk[0] in silent]:
            id, tokens = chunk[0], len(chunk[1])
            if tokens and (span := silent.pop(id, None)):
                span.queued, span.first_tokens = now - span.start, tokens
                sampling[id] = span
                begun.append(id)
        return begun

    def end(
        self, ids: Iterable[str], now: float, outcome: Literal["finished", "interrupted", "failed", "turn"]
    ) -> list[Sample]:
        """Samples are in flight no longer."""
        samples, silent, sampling, ended = self.samples, self._silent, self._sampling, []
        for id in ids:
            sample = samples.pop(id)
            span = sampling.pop(id, None) or silent.pop(id)
            span.end, span.after, span.outcome = now, sample.length - sample.environment_tokens, outcome
            ended.append(sample)
        return ended

    def end_all(self, now: float) -> None:
        self.end(list(self.samples), now, "interrupted")

    def carry(self, now: float) -> list[RequestInterval]:
        """A step ends at `now` and everything stays in flight: its stays as those of the step that begins."""
        carried: dict[str, RequestInterval] = {}
        for id, sample in self.samples.items():
            span = self._sampling.get(id) or self._silent[id]
            running = span.queued is not None or span.running
            span.end, span.after, span.outcome = now, sample.policy_tokens, "running" if running else "interrupted"
            carried[id] = RequestInterval(id, sample.group_id, 0.0, sample.policy_tokens, running=running)
        self._silent, self._sampling = carried, {}
        return list(carried.values())

    async def interrupt(self, engine: Engine, controls: Sequence[str] = ()) -> list[Chunk]:
        """Stop these samples, and no others that the engine holds; return what was sampled for them and not absorbed.

        Args:
            controls: samples of control requests, which are stopped too; their tokens are thrown away.
        """
        interrupted = await engine.interrupt([*self.samples, *controls])
        return [*self.late(), *(chunk for chunk in interrupted if chunk.sample_id not in controls)]

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
    """Wait until one of `waits` is over, or `timeout` seconds have passed."""
    if not waits:
        assert timeout is not None, "there is nothing to wait for"
        await asyncio.sleep(timeout)
        return
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
