"""A request for one token, which shows whether the engine works when requests of samples fail.

Invariant: at most one control request is in flight, and none after `stop`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from april.rollout.engine import Chunk, Engine
from april.rollout.flight import Flight, outlast
from april.rollout.flights import Flights
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory import Sample

CONTROL_SECONDS = 30.0
"""Seconds after which a control request without an answer has failed."""


class ControlRequest:
    """Asks the engine for one token. The token is thrown away."""

    _numbers = itertools.count()
    """Rollouts and an evaluation may each have a control request in the same engine."""

    def __init__(self) -> None:
        self.sample_ids: Sequence[str] = ()
        """The sample that is in flight, if there is one."""
        self._task: asyncio.Task[Chunk] | None = None

    def start(self, engine: Engine, flights: Flights, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Submit the request beside everything else that is in flight."""
        assert self._task is None, "one control request at a time"
        short = replace(sampling, max_tokens=1, max_turns=0)
        sample = Sample(-1, 0, tuple(prompt_ids), short, 0, id=f"control {next(self._numbers)}")
        self._task = asyncio.create_task(_answer(engine, flights, sample), name=sample.id)
        self.sample_ids = (sample.id,)

    def take(self) -> Chunk | None:
        """Return the engine's answer, once: a chunk with an error if the request failed; None if there is no answer.

        Raises:
            EngineError: the engine as a whole failed.
        """
        if self._task is None or not self._task.done():
            return None
        task, self._task, self.sample_ids = self._task, None, ()
        return task.result()

    async def wait(self) -> None:
        """Wait until there is an answer to take."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def stop(self) -> None:
        """Cancel the request that is in flight, if there is one."""
        task, self._task, self.sample_ids = self._task, None, ()
        if task is None:
            return
        task.cancel()
        cancelled = await outlast(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the request is of no use any more
        if cancelled:
            raise asyncio.CancelledError


async def _answer(engine: Engine, flights: Flights, sample: Sample) -> Chunk:
    silent = Chunk(sample.id, (), (), -1, error=f"no answer to a request for one token in {CONTROL_SECONDS:g} s")
    with flights.beside() as flight:
        flight.submit(engine, [sample], 0.0, [])
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CONTROL_SECONDS):
                        return await _answered(engine, flights, flight)
                if len(flights) == len(flight):  # else it may wait behind other samples
                    return silent
        finally:
            await engine.interrupt([sample.id])
            engine.forget([sample.id])


async def _answered(engine: Engine, flights: Flights, flight: Flight) -> Chunk:
    while True:
        for chunk in await flight.poll(partial(flights.poll, engine, flight)):
            if len(chunk.token_ids) or chunk.finish is not None or chunk.error is not None:
                return chunk
        await asyncio.sleep(0)
