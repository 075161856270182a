"""Health of the engine as its requests show it: working, in doubt or down; and control requests, which find out.

An engine has no state of its own for this: an outage shows only in requests that fail or stay without an answer. The
states and what leads from one to the next:

    WORKING  a token has followed the latest failure                     -> DOUBTFUL  a request fails
    DOUBTFUL requests fail, and no token has followed                    -> DOWN      a control request fails
    DOWN     nothing but control requests is submitted, with back-off    -> WORKING   any token, or an answer

From DOUBTFUL any token leads to WORKING as well. An outage that lasts longer than `limit` ends the step.

Invariant: at most one control request is in flight, and none after `stop`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum

from april.rollout.engine import Chunk, EngineError, Fault
from april.rollout.generation.in_flight import InFlight, SharedEngine, outlast
from april.rollout.patience import patient_timeout
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

CONTROL_SECONDS = 30.0
"""Seconds after which a control request without an answer has failed."""
MAX_BACK_OFF = 30.0
"""Longest time in seconds between two attempts."""
MIN_BACK_OFF = 0.01
"""Shortest time in seconds between two control requests."""
REFUSED_SECONDS = 15.0
"""Seconds after which an engine that refuses all requests is given up: waiting does not change its settings."""
WARN_AFTER = 2.0
"""Seconds of an outage before the first warning."""
WARN_AFTER_SILENCE = 10.0
"""The same while the control request has no answer: it may wait in the engine behind other samples."""
WARN_AGAIN = 60.0


class EngineState(Enum):
    WORKING = "working"
    DOUBTFUL = "doubtful"
    DOWN = "down"


def back_off(delay: float, failures: int) -> float:
    """Return the seconds to wait after this number of failures in a row."""
    # Without the bound on the exponent, a very long outage would end in an OverflowError.
    return min(delay * 2.0 ** min(failures - 1, 60), MAX_BACK_OFF)


class EngineHealth:
    """What failed requests and answers show of an engine.

    Args:
        delay: seconds before the second control request; each further one waits twice as long.
        limit: longest outage in seconds.
    """

    def __init__(self, delay: float, limit: float) -> None:
        self._delay = max(delay, MIN_BACK_OFF)
        self._limit = limit
        self._control = ControlRequest()
        self._reset()

    def _reset(self) -> None:
        self._since: float | None = None
        """Time of the first failure that no token has followed."""
        self.attempts = 0
        """Control requests that have failed since the engine last worked."""
        self.next_attempt = 0.0
        """When the next control request is due while the engine is down."""
        self._asked_at: float | None = None
        """Time of the first control request since the engine last worked."""
        self.asked_in = 0
        """Number of the latest batch of chunks before the latest control request."""
        self._error = ""
        self._refused = False
        self._warned: float | None = None

    @property
    def state(self) -> EngineState:
        if self.attempts:
            return EngineState.DOWN
        return EngineState.WORKING if self._since is None else EngineState.DOUBTFUL

    @property
    def controls(self) -> Sequence[str]:
        """Name of the control request in flight, if there is one."""
        return self._control.sample_ids

    def request_failed(self, now: float, chunk: Chunk) -> None:
        """WORKING -> DOUBTFUL."""
        if self._since is None:
            self._since = now
        self._error = chunk.error or ""

    def works(self) -> None:
        """DOUBTFUL, DOWN -> WORKING: a token has come, or an answer to the control request."""
        if self._warned is not None and self._since is not None:
            seconds = asyncio.get_running_loop().time() - self._since
            log.warning("the engine answers again after %.0f s; all samples resume, with every token kept", seconds)
        self._since, self.attempts, self._asked_at, self._warned = None, 0, None, None

    def ask(self, shared: SharedEngine, prompt: Prompt, sampling: SamplingParams, batch: int) -> None:
        """Submit a control request, after this number of batches of chunks."""
        self._asked_at, self.asked_in = self._asked_at or asyncio.get_running_loop().time(), batch
        self._control.start(shared, prompt, sampling)

    def answer(self, now: float) -> Chunk | None:
        """Return the answer to the control request, once; a failure leads to DOWN.

        Raises:
            EngineError: the engine as a whole failed.
        """
        chunk = self._control.take()
        if chunk is not None and chunk.error is not None:
            self._error, self._refused = chunk.error, chunk.fault is Fault.REFUSED
            if self._since is None:  # no request has failed before, or not since the step began
                self._since = self._asked_at = self._control.started
            self.attempts += 1
            self.next_attempt = now + back_off(self._delay, self.attempts)
        return chunk

    async def wait(self) -> None:
        """Wait for the answer to the control request in flight."""
        await self._control.wait()

    async def stop(self) -> None:
        """Cancel the control request in flight, and forget the outage: generation stops."""
        self._reset()
        await self._control.stop()

    def new_step(self) -> None:
        self._reset()

    @property
    def _ends(self) -> float:
        """When the outage has lasted too long. Until a control request has failed, only the time since the first one
        counts: samples that wait for their next attempt request nothing of the engine."""
        assert self._since is not None
        assert self._asked_at is not None
        return (self._since if self.attempts else max(self._since, self._asked_at)) + self._bound

    @property
    def _bound(self) -> float:
        return min(self._limit, REFUSED_SECONDS) if self._refused else self._limit

    @property
    def _warns(self) -> float:
        """When the next warning is due."""
        assert self._since is not None
        if self._warned is not None:
            return self._warned + WARN_AGAIN
        return self._since + (WARN_AFTER if self.attempts else WARN_AFTER_SILENCE)

    @property
    def next_check(self) -> float | None:
        """When `check` has something to do."""
        return None if self._since is None or self._asked_at is None else min(self._ends, self._warns)

    def check(self, now: float, waiting: int) -> None:
        """Warn of an outage, or end it.

        Args:
            waiting: number of samples that wait for the engine.

        Raises:
            EngineError: the outage has lasted for `limit` seconds.
        """
        if self._since is None or self._asked_at is None:
            return
        if now >= self._ends:
            raise EngineError(
                f"the engine has {'refused all requests' if self._refused else 'answered no request'} for "
                f"{now - self._since:.0f} s (outage_limit = {self._limit:g}): {self._error}; "
                "every token is kept, and no sample was given up"
            )
        if now >= self._warns:
            self._warned = now
            log.warning(
                "the engine has answered no request for %.0f s: %s; %d samples wait with every token kept; trying "
                "again for at most %.0f s (outage_limit)",
                now - self._since,
                self._error,
                waiting,
                self._bound,
            )


class ControlRequest:
    """A request for one token, which shows whether the engine works. The token is thrown away."""

    _numbers = itertools.count()
    """Rollouts and an evaluation may each have a control request in the same engine."""

    def __init__(self) -> None:
        self.sample_ids: Sequence[str] = ()
        """Name of the request's sample while it is in flight."""
        self.started = 0.0
        """Time of the latest `start`."""
        self._task: asyncio.Task[Chunk] | None = None

    def start(self, shared: SharedEngine, prompt: Prompt, sampling: SamplingParams) -> None:
        """Submit the request in addition to everything in flight."""
        assert self._task is None, "one control request at a time"
        short = replace(sampling, max_tokens=1, max_turns=0)
        name = f"control {next(self._numbers)}"
        sample = Sample(-1, 0, prompt.token_ids, short, 0, id=name, features=prompt.features)
        self._task = asyncio.create_task(_answer(shared, sample), name=sample.id)
        self.started = asyncio.get_running_loop().time()
        self.sample_ids = (sample.id,)

    def take(self) -> Chunk | None:
        """Return the answer, once: a chunk with an error if the request failed; None if there is no answer yet.

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
        """Cancel the request in flight, if there is one."""
        task, self._task, self.sample_ids = self._task, None, ()
        if task is None:
            return
        task.cancel()
        cancelled = await outlast(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: nothing needs the answer any more
        if cancelled:
            raise asyncio.CancelledError


async def _answer(shared: SharedEngine, sample: Sample) -> Chunk:
    silent = Chunk(sample.id, (), (), -1, error=f"no answer to a request for one token in {CONTROL_SECONDS:g} s")
    with shared.another_user() as in_flight:
        in_flight.submit(shared.engine, [sample], 0.0, [])
        try:
            while True:
                with suppress(TimeoutError):
                    async with patient_timeout(CONTROL_SECONDS):
                        return await _first_chunk(shared, in_flight)
                if len(shared) == len(in_flight):  # otherwise the request may wait behind other samples
                    return silent
        finally:
            # Also after an answer or a cancellation: the request must hold no slot and leave no token behind.
            await shared.engine.interrupt([sample.id])
            shared.engine.forget([sample.id])


async def _first_chunk(shared: SharedEngine, in_flight: InFlight) -> Chunk:
    while True:
        for chunk in await shared.poll(in_flight):
            if len(chunk.token_ids) or chunk.finish is not None or chunk.error is not None:
                return chunk
        # An engine that returns at once would otherwise keep the event loop from running the timeout.
        await asyncio.sleep(0)
