"""Retry failed requests, and distinguish samples that fail from an engine that fails.

In an outage all requests fail. A bad sample fails where others work, or takes the engine down with it. So a failure is
charged to its sample only on evidence that the engine has worked since. The states of a sample whose request failed,
and the methods that lead from one state to the next:

    in flight -> UNDECIDED   `failed`: nothing shows yet whether the sample or the engine is the cause
    in flight -> RETRYING    `failed`: its replica was lost, for the first time in this step, and it is no suspect; no
                             charge
    UNDECIDED -> RETRYING    `_decide`: the engine has worked since (another sample has brought a token, or a control
                             request was answered): one charge. After an outage: no charge
    UNDECIDED -> SUSPECT     `_engine_died`: all requests in flight failed together, so any of them may be the cause
    UNDECIDED -> given up    `_decide`: more than `limit` charges in a row, without a token between them
    SUSPECT   -> given up    `_engine_died`: the engine went down more than `limit` times with this suspect alone
    RETRYING  -> in flight   `due`: its back-off is over
    SUSPECT   -> in flight   `due`: the next set of suspects (`suspects.py` holds them, and submits them in halves)

While the engine is down (`engine_health.py`) nothing is submitted but control requests. A step that begins submits
everything but suspects at once.

Invariants:
- an outage or a lost engine charges no sample, and gives up none;
- a request that did not reach the model is charged only after `outage_limit` seconds of such failures;
- after `outage_limit` seconds without any token `due` raises;
- it raises at once after a failure that no engine and no attempt can avoid: an image that cannot be read any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from april.rollout.engine import Chunk, EngineError, Fault
from april.rollout.generation.engine_health import EngineHealth, EngineState, back_off
from april.rollout.generation.in_flight import InFlight, SharedEngine
from april.rollout.generation.suspects import Suspects
from april.rollout.trajectory.features import Feature
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

SILENCE = 2.0
"""Seconds without a token of another sample, after which a control request is sent."""
SHORTEST_WAIT = 0.001
"""Shortest wait in seconds: a timer may fire a little early, and a wait of nothing would be repeated without end."""


class RequestState(Enum):
    UNDECIDED = "undecided"
    RETRYING = "retrying"


@dataclass(slots=True, eq=False)
class FailedRequest:
    """The latest request of a sample that waits for its next attempt."""

    sample: Sample
    error: str
    fault: Fault
    at: float
    """Time of the failure."""
    batch: int
    """Number of the batch of chunks that contained the failure."""
    due: float
    """Time of the next attempt; evidence is not looked for before it either."""
    state: RequestState = RequestState.UNDECIDED

    @property
    def id(self) -> str:
        return self.sample.id


@dataclass(slots=True)
class FailuresInARow:
    """Failures of a sample since its latest token."""

    since: float
    """Time of the first failure."""
    count: int = 0
    charges: int = 0


class Retries:
    """Samples whose latest request failed.

    `len` counts those that wait for another attempt, and `in` tests whether a sample is one of them.

    Args:
        limit: charges in a row that a sample may have.
        delay: seconds until the second attempt; each further one waits twice as long.
        outage_limit: longest outage in seconds.
    """

    def __init__(self, limit: int, delay: float, outage_limit: float = 600.0) -> None:
        self._limit = limit
        self._delay = delay
        self._outage_limit = outage_limit
        self._failures: dict[str, FailuresInARow] = {}
        self._waiting: dict[str, FailedRequest] = {}
        """Requests that are UNDECIDED or RETRYING."""
        self._lost: set[str] = set()
        """Samples that lost a replica in this step. Tokens do not remove them, or a sample that takes down its replica
        after a few tokens each time would never become a suspect."""
        self._suspects: Suspects[FailedRequest] = Suspects()
        self._given_up: list[tuple[Sample, str]] = []
        self._health = EngineHealth(delay, outage_limit)
        self._batch = 0
        """Number of the latest batch of chunks."""
        self._witnesses: dict[str, int] = {}
        """While any sample waits: the batch of the latest token of each sample whose request has not failed since, the
        latest batch last."""
        self._answered_prompt: tuple[tuple[int, ...], tuple[Feature, ...]] | None = None
        """A prompt that the engine has continued."""
        self._unreadable: str | None = None
        """Why a prompt cannot be read any more."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._suspects)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self._waiting or sample.id in self._suspects

    @property
    def down(self) -> bool:
        """Whether nothing but a control request may be submitted."""
        return self._health.state is EngineState.DOWN and bool(self._waiting)

    @property
    def controls(self) -> Sequence[str]:
        """Name of the control request in flight, if there is one."""
        return self._health.controls

    async def wait(self) -> None:
        """Wait for the answer to the control request in flight."""
        await self._health.wait()

    def received(self, chunks: Sequence[Chunk], started: Sequence[Sample]) -> None:
        """Record a batch of chunks, before its failures.

        Args:
            started: samples that have brought the first tokens of their requests.
        """
        self._batch += 1
        if started:
            self._answered_prompt = started[-1].prompt_ids, started[-1].prompt_features
        for sample in started if self._failures else ():
            self._failures.pop(sample.id, None)
        self._suspects.received_tokens(started)
        if len(self) or self._health.state is not EngineState.WORKING:
            brought = [chunk for chunk in chunks if len(chunk.token_ids) or chunk.finish is not None]
            if brought:
                self._health.works()
            for chunk in brought if self._waiting else ():
                # Removed and inserted again: `_witnessed` reads only the last entry, which has to be the latest batch.
                self._witnesses.pop(chunk.sample_id, None)
                if chunk.finish is None:  # a finished sample has no request that could fail
                    self._witnesses[chunk.sample_id] = self._batch

    def failed(self, sample: Sample, chunk: Chunk) -> None:
        """Record that the request of `sample` failed, with `chunk`."""
        now = asyncio.get_running_loop().time()
        failures = self._failures.setdefault(sample.id, FailuresInARow(now))
        failures.count += 1
        request = FailedRequest(sample, chunk.error or "", chunk.fault, now, self._batch, now)
        self._waiting[sample.id] = request
        self._witnesses.pop(sample.id, None)
        self._suspects.request_failed(sample.id)
        if chunk.fault is Fault.INPUT:
            self._unreadable = chunk.error
        # A first loss has an explanation, the dead replica: neither this sample nor the other replicas are in doubt.
        if chunk.fault is Fault.LOST and not (sample.id in self._lost or self._suspects.suspected(sample.id)):
            self._lost.add(sample.id)
            request.state = RequestState.RETRYING
            return
        request.due = now + back_off(self._delay, failures.count)
        self._health.request_failed(now, chunk)

    def due(self, shared: SharedEngine, in_flight: InFlight) -> list[Sample]:
        """Return the samples to submit now; they wait no longer. Decide about failures, and send a control request if
        nothing else provides evidence.

        Args:
            shared: the engine.
            in_flight: the samples in flight that are retried here.

        Raises:
            EngineError: the outage has lasted for too long, the engine as a whole failed, or a prompt cannot be read.
        """
        if self._unreadable is not None:
            raise EngineError(self._unreadable)
        now = asyncio.get_running_loop().time()
        self._take_answer(now)
        if not len(self):
            return []
        self._health.check(now, len(self))
        ready = [] if self.down else self._ready(in_flight, now)
        for request in ready:
            self._waiting.pop(request.id, None)
        control_due = self._next_control(bool(in_flight))
        # Requests that are submitted now will provide the evidence themselves.
        if control_due is not None and control_due <= now and not ready:
            self._send_control(shared)
        if not self._waiting:
            self._witnesses.clear()
        return [request.sample for request in ready]

    def _ready(self, in_flight: InFlight, now: float) -> list[FailedRequest]:
        """Decide about failures that have a witness; return the requests to submit, else the next set of suspects."""
        witnessed = [request for request in self._undecided if request.due <= now and self._witnessed(request)]
        # Together: one death explains the losses, and any of these samples may have caused it.
        if lost := [request for request in witnessed if request.fault is Fault.LOST]:
            self._engine_died(lost, now)
        for request in witnessed:
            if request.fault is not Fault.LOST:
                self._decide(request)
        retrying = (request for request in self._waiting.values() if request.state is RequestState.RETRYING)
        ready = [request for request in retrying if request.due <= now]
        undecided = {request.id for request in self._undecided}
        return ready or self._suspects.next_set(in_flight.samples.keys() | undecided, now)

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
        times = [self._next_control(in_flight), self._health.next_check]
        if not self.down:
            retrying = RequestState.RETRYING
            times += [r.due for r in self._waiting.values() if r.state is retrying or r.due > now]
            if (acquitted := self._suspects.next) is not None and acquitted > now:
                times.append(acquitted)
        return min((max(SHORTEST_WAIT, time - now) for time in times if time is not None), default=None)

    async def stop(self) -> None:
        """Cancel the control request in flight, and forget the outage: generation stops."""
        await self._health.stop()

    def forget(self, samples: Iterable[Sample]) -> None:
        """Forget samples that never resume."""
        ids = {sample.id for sample in samples}
        self._lost -= ids
        for id in ids:
            self._failures.pop(id, None)
            self._waiting.pop(id, None)
        self._suspects.forget(ids)
        self._given_up = [(sample, error) for sample, error in self._given_up if sample.id not in ids]

    def new_step(self) -> None:
        """Let no sample wait any longer, except for suspects."""
        for request in self._undecided:
            # Before the requests are cleared, or a sample that fails at the end of each step would never be charged.
            if request.fault is not Fault.LOST and self._witnessed(request):
                self._decide(request)
        self._waiting.clear()
        self._witnesses.clear()
        self._lost.clear()
        self._health.new_step()

    @property
    def _undecided(self) -> list[FailedRequest]:
        return [request for request in self._waiting.values() if request.state is RequestState.UNDECIDED]

    def _witnessed(self, request: FailedRequest) -> bool:
        """Return whether another sample, whose request has not failed since, has brought a token since the failure."""
        return next(reversed(self._witnesses.values()), 0) > request.batch

    def _decide(self, request: FailedRequest) -> None:
        """UNDECIDED -> RETRYING, or given up: the engine worked while the request failed."""
        request.state = RequestState.RETRYING
        failures = self._failures.setdefault(request.id, FailuresInARow(request.at))
        if request.fault is Fault.UNAVAILABLE and request.at - failures.since <= self._outage_limit:
            return
        failures.charges += 1
        if failures.charges > self._limit:
            self._give_up(request, request.error)

    def _engine_died(self, failed: list[FailedRequest], now: float) -> None:
        """UNDECIDED -> SUSPECT, RETRYING or given up: the engine went down with these requests in flight."""
        free, charged = self._suspects.engine_died(failed, now)
        for request in failed:
            del self._waiting[request.id]
        for request in free:
            request.state, request.due = RequestState.RETRYING, 0.0
            self._waiting[request.id] = request
        if charged is not None and (deaths := self._suspects.charges(charged.id)) > self._limit:
            self._give_up(
                charged, f"the engine went down {deaths} times with this sample as the only suspect: {charged.error}"
            )

    def _give_up(self, request: FailedRequest, error: str) -> None:
        self.forget([request.sample])
        self._given_up.append((request.sample, error))

    def _next_control(self, in_flight: bool) -> float | None:
        """Return when a control request is due; None if none is needed."""
        if self._health.controls or not self._waiting:
            return None
        if self.down:
            return self._health.next_attempt
        undecided = [request.due for request in self._undecided]
        return min(undecided) + (SILENCE if in_flight else 0.0) if undecided else None

    def _send_control(self, shared: SharedEngine) -> None:
        """Request one token, of a prompt that the engine has continued before, else of the waiting samples in turn."""
        requests = list(self._waiting.values())
        # In turn: a single prompt that the engine cannot process must not make the engine look down forever.
        sample = requests[self._health.attempts % len(requests)].sample
        prompt_ids, features = self._answered_prompt or (sample.prompt_ids, sample.prompt_features)
        self._health.ask(shared, Prompt(prompt_ids, features=features), sample.sampling, self._batch)

    def _take_answer(self, now: float) -> None:
        """Decide about the requests that failed before the control request, if the engine has answered it."""
        was_down, batch = self._health.state is EngineState.DOWN, self._health.asked_in
        answer = self._health.answer(now)
        if answer is None or answer.error is not None:
            return
        failed = [request for request in self._undecided if request.batch <= batch and not self._witnessed(request)]
        may_have_killed = [request for request in failed if request.fault in (Fault.UNKNOWN, Fault.LOST)]
        # The engine did not go down, so a request that failed alone was its own cause.
        if not was_down and self._is_bad_sample(may_have_killed):
            may_have_killed = []
        for request in failed:
            request.due = now
            if was_down:
                request.state = RequestState.RETRYING
            elif request not in may_have_killed:
                self._decide(request)
        if may_have_killed:
            self._engine_died(may_have_killed, now)
        self._health.works()

    def _is_bad_sample(self, failed: Sequence[FailedRequest]) -> bool:
        """Return whether one request failed alone, with its replica alive, and its sample is no suspect."""
        return len(failed) == 1 and failed[0].fault is Fault.UNKNOWN and not self._suspects.suspected(failed[0].id)
