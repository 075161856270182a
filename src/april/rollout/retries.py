"""Requests to an engine that failed: which failures are charged to their samples, and when the samples go on.

An outage makes all requests fail. A bad sample fails where others work, or takes the engine down with it. Each case has
one rule:

Invariants:
- a failure is charged to its sample only if the engine worked meanwhile: another sample has brought a token since, or,
  if none has by the time of the next attempt, the answer to a control request of one token;
- if the control request fails too, there is an outage: nothing is charged, and nothing but the control request is
  submitted until it is answered; then everything goes on from its last token;
- if all requests in flight failed together, any of them may have taken the engine down: they go on in halves, and the
  engine going down is charged to a sample that was the only suspect in flight (`suspects.py`);
- a sample with more than `limit` charges in a row, without a token between them, is given up;
- attempts wait `delay` seconds after the first failure and twice as long after each further one, at most 30 s;
- an outage lasts at most `outage_limit` seconds without any token; then `due` raises, and nothing has been given up;
- a failure that says that the model has not seen the request is charged only after `outage_limit` seconds of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from april.rollout.control_request import ControlRequest
from april.rollout.engine import Chunk, Engine, Fault
from april.rollout.flight import Flight
from april.rollout.flights import Flights
from april.rollout.outage import Outage, back_off
from april.rollout.suspects import Suspects
from april.rollout.trajectory import Sample

SILENCE = 2.0
"""Seconds without a token from other samples, after which a control request shows whether the engine works."""
SHORTEST = 0.01
"""Seconds between two control requests at least."""


@dataclass(slots=True, eq=False)
class FailedRequest:
    """The last request of a sample that waits for its next attempt."""

    sample: Sample
    error: str
    fault: Fault
    at: float
    """When the request failed."""
    batch: int
    """Number of the batch of chunks that the failure came with."""
    due: float
    judged: bool = False
    """The next attempt needs no evidence any more."""

    @property
    def id(self) -> str:
        return self.sample.id


class Retries:
    """The samples whose last request failed.

    `len` counts those that wait for another attempt, and `in` says whether a sample is one of them.

    Args:
        limit: charges in a row, without a token between them, that a sample may have.
        delay: seconds until the second attempt.
        outage_limit: seconds that an outage may last.
    """

    def __init__(self, limit: int, delay: float, outage_limit: float = 600.0) -> None:
        self._limit = limit
        self._delay = delay
        self._outage_limit = outage_limit
        self._charges: dict[str, int] = {}
        self._in_a_row: dict[str, int] = {}
        """Failures of a sample in a row, charged or not: they make its back-off."""
        self._failing_since: dict[str, float] = {}
        """When the first of them was."""
        self._waiting: dict[str, FailedRequest] = {}
        self._suspects: Suspects[FailedRequest] = Suspects()
        self._given_up: list[tuple[Sample, str]] = []
        self._batch = 0
        self._witnesses: dict[str, int] = {}
        """While any sample waits: the batch of the latest token of each sample whose request has not failed since, the
        latest batch last."""
        self._answered_prompt: tuple[int, ...] | None = None
        """A prompt that the engine has continued."""
        self._control = ControlRequest()
        self._outage = Outage(outage_limit)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._suspects)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self._waiting or sample.id in self._suspects

    @property
    def down(self) -> bool:
        """Whether nothing but a control request may be submitted."""
        return self._outage.attempts > 0 and bool(self._waiting)

    def heard(self, chunks: Sequence[Chunk], begun: Sequence[str], samples: Mapping[str, Sample]) -> None:
        """Record a batch of chunks, before its failures.

        Args:
            begun: samples that have brought their first tokens since they were submitted.
            samples: those in flight, by name.
        """
        self._batch += 1
        for id in begun:
            self._answered_prompt = samples[id].prompt_ids
            self._charges.pop(id, None)
            self._in_a_row.pop(id, None)
            self._failing_since.pop(id, None)
        self._suspects.went_on(begun)
        if len(self) or self._outage.began is not None:
            brought = [chunk for chunk in chunks if len(chunk.token_ids) or chunk.finish is not None]
            if brought:
                self._outage.end()
            for chunk in brought if self._waiting else ():
                self._witnesses.pop(chunk.sample_id, None)
                if chunk.finish is None:  # else its request can fail no more
                    self._witnesses[chunk.sample_id] = self._batch

    def failed(self, sample: Sample, chunk: Chunk) -> None:
        """Record that the request of `sample` failed, with `chunk`."""
        now = asyncio.get_running_loop().time()
        row = self._in_a_row[sample.id] = self._in_a_row.get(sample.id, 0) + 1
        self._failing_since.setdefault(sample.id, now)
        due = now + back_off(self._delay, row)
        self._waiting[sample.id] = FailedRequest(sample, chunk.error or "", chunk.fault, now, self._batch, due)
        self._witnesses.pop(sample.id, None)
        self._suspects.request_failed(sample.id)
        self._outage.begin(now, chunk)

    def due(self, engine: Engine, flights: Flights, flight: Flight) -> list[Sample]:
        """Return the samples to submit now; they wait no longer. Judge failures, by a control request if necessary.

        Args:
            flights: everything in flight in `engine`.
            flight: the samples that are retried here, among them.

        Raises:
            EngineError: the outage has lasted for too long, or the engine as a whole failed.
        """
        now = asyncio.get_running_loop().time()
        self._take_answer(now)
        if not len(self):
            return []
        self._outage.check(now, len(self))
        if self.down:
            ready = []
        else:
            waiting = [request for request in self._waiting.values() if not request.judged and request.due <= now]
            witnessed = [request for request in waiting if self._witnessed(request)]
            if lost := [request for request in witnessed if request.fault is Fault.LOST]:
                self._engine_died(lost, now)
            for request in witnessed:
                if request.fault is not Fault.LOST:
                    self._judge(request)
            ready = [request for request in self._waiting.values() if request.judged and request.due <= now]
            if not ready:
                undecided = {request.id for request in self._waiting.values() if not request.judged}
                ready = self._suspects.next_set(flight.samples.keys() | undecided, now)
        for request in ready:
            self._waiting.pop(request.id, None)
        wanted = self._next_control(bool(flight))
        if wanted is not None and wanted <= now and not ready:
            self._start_control(engine, flights)
        if not self._waiting:
            self._witnesses.clear()
        return [request.sample for request in ready]

    def given_up(self) -> list[tuple[Sample, str]]:
        """Return the samples that were given up since the last call, each with its last error."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def next(self, in_flight: bool) -> float | None:
        """Return the seconds until `due` has something to do; None if nothing waits.

        Args:
            in_flight: whether other samples are in flight.
        """
        if not len(self):
            return None
        now = asyncio.get_running_loop().time()
        times = [self._next_control(in_flight), self._outage.next]
        if not self.down:
            times += [request.due for request in self._waiting.values() if request.judged or request.due > now]
            if (acquitted := self._suspects.next) is not None and acquitted > now:
                times.append(acquitted)
        # A timer may fire a little early: a wait that is too short for it to notice would be repeated without end.
        return min((max(SHORTEST / 10, time - now) for time in times if time is not None), default=None)

    async def wait(self) -> None:
        """Wait for the answer to the control request that is in flight."""
        await self._control.wait()

    @property
    def controls(self) -> Sequence[str]:
        """The sample of the control request that is in flight, if there is one."""
        return self._control.sample_ids

    async def stop(self) -> None:
        """End the control request, if one is in flight, and the outage with it: generation stops."""
        self._outage = Outage(self._outage_limit)
        await self._control.stop()

    def forget(self, samples: Iterable[Sample]) -> None:
        """Forget samples that never go on."""
        ids = {sample.id for sample in samples}
        for id in ids:
            self._charges.pop(id, None)
            self._in_a_row.pop(id, None)
            self._failing_since.pop(id, None)
            self._waiting.pop(id, None)
        self._suspects.forget(ids)
        self._given_up = [(sample, error) for sample, error in self._given_up if sample.id not in ids]

    def new_step(self) -> None:
        """Let no sample wait any longer, except for suspects that are held back."""
        for request in list(self._waiting.values()):
            if not request.judged and request.fault is not Fault.LOST and self._witnessed(request):
                self._judge(request)
        self._waiting.clear()
        self._witnesses.clear()
        self._outage = Outage(self._outage_limit)

    def _witnessed(self, request: FailedRequest) -> bool:
        """Whether another sample has brought a token since the failure, and its request has not failed since."""
        return next(reversed(self._witnesses.values()), 0) > request.batch

    def _judge(self, request: FailedRequest) -> None:
        """The engine worked while a request failed."""
        request.judged = True
        failing = request.at - self._failing_since.get(request.id, request.at)
        if request.fault is not Fault.UNAVAILABLE or failing > self._outage_limit:
            self._charge(request)

    def _charge(self, request: FailedRequest) -> None:
        charges = self._charges[request.id] = self._charges.get(request.id, 0) + 1
        if charges > self._limit:
            self._give_up(request, request.error)

    def _give_up(self, request: FailedRequest, error: str) -> None:
        self.forget([request.sample])
        self._given_up.append((request.sample, error))

    def _engine_died(self, failed: list[FailedRequest], now: float) -> None:
        """The engine, or a replica, went down with these requests in flight."""
        free, charged = self._suspects.engine_died(failed, now)
        for request in failed:
            del self._waiting[request.id]
        for request in free:
            request.judged, request.due = True, 0.0
            self._waiting[request.id] = request
        if charged is not None and (deaths := self._suspects.charges(charged.id)) > self._limit:
            self._give_up(
                charged, f"the engine went down {deaths} times with this sample as the only suspect: {charged.error}"
            )

    def _next_control(self, in_flight: bool) -> float | None:
        """When a control request is due; None if none is needed."""
        if self._control.sample_ids or not self._waiting:
            return None
        if self.down:
            return self._outage.next_attempt
        undecided = [request.due for request in self._waiting.values() if not request.judged]
        return min(undecided) + (SILENCE if in_flight else 0.0) if undecided else None

    def _start_control(self, engine: Engine, flights: Flights) -> None:
        """Ask for one token: of a prompt that the engine has continued before, else of those that wait, in turn."""
        requests = list(self._waiting.values())
        one = requests[self._outage.attempts % len(requests)].sample
        self._outage.ask(asyncio.get_running_loop().time(), self._batch)
        self._control.start(engine, flights, self._answered_prompt or one.prompt_ids, one.sampling)

    def _take_answer(self, now: float) -> None:
        answer = self._control.take()
        if answer is None:
            return
        if answer.error is not None:
            self._outage.attempt_failed(now, max(self._delay, SHORTEST), answer)
            return
        outage, batch = self._outage.attempts > 0, self._outage.asked_in
        failed = [r for r in self._waiting.values() if r.batch <= batch and not r.judged and not self._witnessed(r)]
        broken = [request for request in failed if request.fault in (Fault.UNKNOWN, Fault.LOST)]
        alone = len(broken) == 1 and not outage and broken[0].fault is Fault.UNKNOWN
        alone = alone and not self._suspects.suspected(broken[0].id)
        for request in failed:
            request.due = now
            if outage:
                request.judged = True
            elif alone or request not in broken:
                self._judge(request)
        if broken and not alone:
            self._engine_died(broken, now)
        self._outage.end()
