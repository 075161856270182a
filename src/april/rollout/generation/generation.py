"""Samples in generation: through the engine, and the turns of episodes through their environments, until they finish.

Invariants:
- every token that the engine returns is appended to its sample before anything else happens, so no interrupt, failed
  request, dead engine or cancelled wait loses a sampled token;
- an interrupt that has begun is completed even if its caller is cancelled;
- nothing is submitted for a quarantined group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from april.rollout.batch import Failure
from april.rollout.buffer import Rejection
from april.rollout.engine import Chunk, Engine, EngineError
from april.rollout.episodes.episodes import EpisodeError, Episodes
from april.rollout.events import Branched, Ended, Stepped
from april.rollout.generation.in_flight import InFlight, SharedEngine, Wait, first_of, outlast
from april.rollout.generation.quarantine import Quarantined
from april.rollout.generation.retries import Retries
from april.rollout.history import History
from april.rollout.params import FaultSettings
from april.rollout.step_stats import StepStats
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample

Finished = Callable[[Sequence[Sample], Sequence[Group]], None]
"""Called with samples that have finished, and the groups that are complete with them."""


class Generation:
    """Generates the samples of the groups in a state.

    Args:
        shared: the engine.
        in_flight: this user's samples in the engine.
        history: applies and records the events.
        stats: statistics of the batch that is being collected.
        quarantined: groups that are left out.
        faults: treatment of requests that fail.
        episodes: the environments that answer the policy's turns.
        on_finished: called when samples have finished.
        on_progress: called whenever something was sampled.
        give_up_limit: groups of one step that may be given up before the step fails; None for N'.
    """

    def __init__(
        self,
        shared: SharedEngine,
        in_flight: InFlight,
        history: History,
        stats: StepStats,
        quarantined: Quarantined,
        faults: FaultSettings,
        episodes: Episodes | None,
        on_finished: Finished,
        on_progress: Callable[[], None] | None,
        give_up_limit: int | None,
    ) -> None:
        self.shared = shared
        self.in_flight = in_flight
        self.history = history
        self.state = history.state
        self.stats = stats
        self.quarantined = quarantined
        self.episodes = episodes
        self.on_finished = on_finished
        self.on_progress = on_progress
        self.give_up_limit = give_up_limit
        self.retries = Retries(faults.max_retries, faults.retry_delay, faults.outage_limit)
        self._interrupted = False
        """Some unfinished samples are not in flight: they were interrupted, or have never been submitted."""
        if episodes is not None:
            episodes.connect(lambda: self.state.buffer)
        self._answered: list[Sample] = []
        """Samples whose environment has answered, to be submitted next."""

    @property
    def engine(self) -> Engine:
        return self.shared.engine

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, at an environment, or waiting for its next attempt."""
        return not (self.in_flight or self.episodes or self.retries)

    def start_step(self) -> None:
        """Start with nothing in flight: every unfinished sample is submitted next."""
        self._interrupted = True
        self.retries.new_step()

    def submit(self, admitted: Sequence[Group], due: Iterable[Sample]) -> None:
        """Submit samples: interrupted samples first, then samples of `admitted` groups, of answered turns, and samples
        whose next attempt is `due`."""
        # The engine serves samples in the order of submission. The buffer is in the order of admission, so interrupted
        # samples of older groups come before new groups.
        groups = self.state.buffer if self._interrupted else admitted
        samples = (sample for group in groups for sample in group.samples if sample.finish is None)
        self._submit((sample for sample in samples if sample not in self.retries) if self.retries else samples)
        self._interrupted = False
        if self._answered:
            answered, self._answered = self._answered, []
            # A group may have been rejected since its environment answered.
            self._submit([sample for sample in answered if sample.group_id in self.state.buffer.groups])
        self._submit(due)

    def _submit(self, samples: Iterable[Sample]) -> None:
        in_flight, quarantined, journal = self.in_flight.samples, self.quarantined, self.history.journal
        samples = [sample for sample in samples if sample.finish is None and sample.id not in in_flight]
        if len(quarantined):
            samples = [sample for sample in samples if sample.group_id not in quarantined]
        if self.episodes is not None:
            durable = None if journal is None else journal.drain
            for sample in samples:
                # In mid-turn too: the program of a resumed episode, or one that outlived april, asks at once.
                if sample.awaits_environment or sample.origin is not None:
                    self.episodes.begin(sample, self.state.buffer.group_of(sample), durable)
            samples = [sample for sample in samples if not sample.awaits_environment]
        self.in_flight.submit(self.engine, samples, self.stats.now, self.stats.batch.request_intervals)

    def due_for_retry(self) -> list[Sample]:
        """Return the samples whose next attempt is due; quarantine the groups of samples that have failed too often.

        Raises:
            EngineError: an outage has lasted too long, or too many groups were given up.
        """
        due = self.retries.due(self.shared, self.in_flight)
        hopeless = None
        for sample, error in self.retries.given_up():
            if self._give_up(self.state.buffer.group_of(sample), Rejection.ENGINE, error):
                hopeless = EngineError(
                    f"requests to the engine keep failing; the last one, sample {sample.id}: {error}"
                )
        if hopeless is not None:
            raise hopeless
        return due

    def _give_up(self, group: Group, reason: Rejection, error: str) -> bool:
        """Quarantine a group; return whether that has happened to too many groups of the step."""
        self.quarantined.add(group, reason, error)
        rejections = self.stats.batch.rejections
        # If as many groups failed as the buffer holds, their samples are not the cause: replacements would fail too.
        given_up = len(self.quarantined) + sum(rejected is reason for _, rejected in rejections)
        return given_up >= (self.give_up_limit or self.stats.batch.target)

    async def poll(self, waits: Sequence[Wait]) -> bool:
        """Wait for tokens, an environment's answer, a retry, or the end of one of `waits`; process the tokens.

        Returns:
            False, at once, if this has nothing to wait for.
        """
        before, slots = self.stats.now, self.engine.capacity.slots
        idle = max(1 - len(self.in_flight) / slots, 0.0)
        waits = [*waits, self.episodes.wait] if self.episodes else waits
        waits = [*waits, self.retries.wait] if self.retries.controls else waits
        if self.in_flight:
            try:
                chunks = await self.shared.poll(self.in_flight, self.retries.next(True), waits)
            finally:
                # Also if the wait is cancelled: its time would otherwise count as time of an idle engine.
                self.stats.batch.occupancy += (self.stats.now - before) * self.engine.running / slots
                self.stats.batch.idle_slots += (self.stats.now - before) * idle
            self.absorb(chunks)
        elif self.episodes:
            await first_of(waits, self.retries.next(False))
            self.stats.batch.environment_wait_seconds += self.stats.now - before
            self.stats.batch.idle_slots += self.stats.now - before
        elif self.retries:
            await first_of(waits, self.retries.next(False))
        else:
            return False
        return True

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Append tokens to their samples, then process the samples whose requests have ended.

        Raises:
            ChunkError: a chunk broke a rule; every other chunk was absorbed.
        """
        now, in_flight = self.stats.now, self.in_flight
        tokens, started, ended, failed, complete, broken = self.history.absorb(chunks, in_flight.samples)
        self.stats.batch.sampled_tokens += tokens
        # Before the failures: tokens of the same batch are no evidence that the engine worked after them.
        self.retries.received(chunks, started)
        in_flight.mark_started(started, now)
        for chunk in failed:
            self._request_failed(chunk, now)
        if self.episodes is not None:
            ended = self._end_turns(ended, now)
            self.episodes.drop(ended)
        in_flight.end(ended, now, "finished")
        for error in broken:
            if (sample := in_flight.samples.get(error.chunk.sample_id)) is not None:
                in_flight.end([sample], now, "failed")  # later tokens would leave a gap
        self.on_finished(ended, complete)
        if broken:  # raised last: every token of these chunks is in its sample
            raise broken[0]
        if self.on_progress is not None:
            self.on_progress()

    def _end_turns(self, ended: Sequence[Sample], now: float) -> list[Sample]:
        """Pass ended turns to their environments; return the samples that have finished."""
        turns = [sample for sample in ended if sample.finish is None]
        self.in_flight.end(turns, now, "turn")
        self._submit(turns)
        return [sample for sample in ended if sample.finish is not None]

    def _request_failed(self, chunk: Chunk, now: float) -> None:
        """Record a failed request; its sample waits for its next attempt, which continues from its last token."""
        sample = self.in_flight.samples[chunk.sample_id]
        group = self.state.buffer.group_of(sample)
        self.stats.add_failure(Failure("engine", chunk.sample_id, group.prompt.id, chunk.error or ""))
        self.in_flight.end([sample], now, "failed")
        if group.id not in self.quarantined:
            self.retries.failed(sample, chunk)

    def take_answers(self) -> None:
        """Apply the answers that environments have given since the last call.

        Raises:
            EpisodeError: environments failed for too many groups.
        """
        finished: list[Sample] = []
        complete: list[Group] = []
        hopeless = None
        for sample, group, event, failures in self.episodes.take() if self.episodes is not None else ():
            self.stats.batch.failures += failures
            if group.id not in self.state.buffer.groups or group.id in self.quarantined:
                continue
            if event is None:
                if self._give_up(group, Rejection.ENVIRONMENT, failures[-1].error):
                    hopeless = EpisodeError(
                        f"environments keep failing; the last one, sample {sample.id}: {failures[-1].error}"
                    )
                continue
            # Before the event: a restart drops sequences that branched off.
            episode = group.episode(sample.episode)
            self.history.apply(event)
            match event:
                case Branched(_, index):
                    sample = group.sample(index)
                case Ended(_, _, last):
                    sample = group.sample(last)
                case Stepped(sample_id):
                    sample = self.state.buffer.find(sample_id)
            if sample.finish is None:
                self._answered.append(sample)
            else:
                finished.append(sample)
                if group.complete:
                    complete.append(group)
            # A finished or restarted sample never continues on its KV cache.
            if sample.finish is not None or not sample.transitions:
                self.engine.forget([one.id for one in episode])
        self.on_finished(finished, complete)
        if hopeless is not None:  # raised last: every answer is in its sample
            raise hopeless

    def discard(self, group: Group) -> None:
        """Free the resources of a group that was rejected."""
        if unfinished := [sample.id for sample in group.samples if sample.finish is None]:
            self.engine.forget(unfinished)
        if self.episodes is not None:
            self.episodes.drop(group.samples)

    async def interrupt(self) -> None:
        """Stop the samples in flight, and keep every token of them."""
        try:
            if self.in_flight:
                await self._interrupt()
        finally:
            self._interrupted = True  # also with nothing in flight: an update may turn complete samples into drafts
            await self.retries.stop()

    async def _interrupt(self) -> None:
        cancelled = False
        try:
            try:
                chunks = await self.in_flight.interrupt(self.engine, self.retries.controls)
            except asyncio.CancelledError:
                # The first call may have stopped some samples; the engine keeps their tokens until they are named
                # again.
                cancelled = True
                second = asyncio.ensure_future(self.in_flight.interrupt(self.engine, self.retries.controls))
                await outlast(second)
                chunks = second.result()
            self.absorb(chunks)
        except EngineError:  # tokens that the engine returned before are kept
            if undelivered := self.in_flight.undelivered():
                self.absorb(undelivered)
            raise
        finally:
            self.in_flight.end_all(self.stats.now)
            self._interrupted = True
            # Also in place of an error of the engine: the task of the caller was cancelled, and has to end.
            if cancelled:
                raise asyncio.CancelledError
