"""The pump: fill the engine, poll it, settle what came; in the foreground while somebody waits for a step, or in a task
of its own while generation goes on beside training.

Invariants:
- every token an engine hands out is appended to its sample before anything else happens, so an interrupt, a failing
  request, a dead engine or a cancelled wait loses nothing that was sampled;
- one of two moves the rollouts on at any time: the background task between `start` and `stop`, or else the caller;
- with S the bound, at most N * (S + 1 - (`next_train_version` - `engine_version`)) groups are in the buffer: a group
  that begins now, at `engine_version`, can still be trained on in time after all others, counted from the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from april.rollout.batch import Failure, Plan, Quarantine
from april.rollout.buffer import Rejection
from april.rollout.engine import Chunk, Engine, EngineError
from april.rollout.episodes import EpisodeError, Episodes
from april.rollout.events import Accepted, Rejected, Rewarded
from april.rollout.flight import first_of, outlast
from april.rollout.flights import Flights
from april.rollout.history import History
from april.rollout.order import ORDERS
from april.rollout.params import FaultSettings
from april.rollout.prompt_source import PromptSource
from april.rollout.retries import Retries
from april.rollout.rewards import RewardError, RewardTasks, Verdict, described
from april.rollout.step_stats import StepStats
from april.rollout.trajectory import Group, Reward, Sample
from april.rollout.user_code import UserCode


class RolloutLoop:
    """Moves rollouts on.

    Args:
        engine: whatever generates.
        history: what happens goes there.
        prompts: where new groups come from.
        rewards: scores what has finished.
        faults: what is done about rewards and requests that fail.
        episodes: the environments that answer the policy's turns.
        dynamic_filter: called with each complete, rewarded group; False turns it away.
        on_progress: called whenever something was sampled.
        overlap: generation continues while the trainer trains, so batches since the last weight update count.

    Attributes:
        stats: of the batch that is being collected.
        error: what ended the background task; the next step raises it.
    """

    def __init__(
        self,
        engine: Engine,
        history: History,
        prompts: PromptSource,
        rewards: RewardTasks,
        faults: FaultSettings,
        episodes: Episodes | None = None,
        dynamic_filter: Callable[[Group], bool] | None = None,
        on_progress: Callable[[], None] | None = None,
        overlap: bool = False,
    ) -> None:
        self.engine = engine
        self.history = history
        self.state = history.state
        self.prompts = prompts
        self.rewards = rewards
        self.faults = faults
        self.episodes = episodes
        self.dynamic_filter = dynamic_filter
        self.on_progress = on_progress
        self.overlap = overlap
        self.params = params = self.state.params
        self.order = ORDERS[params.order] if isinstance(params.order, str) else params.order
        self.retries = Retries(faults.max_retries, faults.retry_delay, faults.outage_limit)
        self.flights = Flights()
        self.flight = self.flights.rollouts
        self.stats = StepStats(Plan(params.rollout_batch_size))
        self.error: Exception | None = None
        self._quarantined: dict[int, Quarantine] = {}
        """Groups to turn away as soon as nothing of them is in flight."""
        self._resume = False
        """Something unfinished is not in flight."""
        self._answered: list[Sample] = []
        """Samples whose environment has answered, to be submitted next."""
        self._task: asyncio.Task[None] | None = None

    @property
    def next_train_version(self) -> int:
        """The policy version that is trained on the next batch."""
        return self.state.trainer_version if self.overlap else self.state.engine_version

    @property
    def running(self) -> bool:
        """Whether generation goes on by itself."""
        return self._task is not None and self.error is None

    @property
    def stalled(self) -> bool:
        """Nothing is to be waited for: no token, no environment, no reward, no request that is tried again."""
        return not (self.flight or self.episodes or self.rewards or self.retries)

    def start(self) -> None:
        """Go on in the background."""
        assert self._task is None, "the pump runs already"
        self._task = asyncio.create_task(self._run(), name="generation")

    async def stop(self) -> None:
        """End the background task, and leave in flight what is. `error` says what ended it before, if anything did."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            if await outlast(task):
                raise asyncio.CancelledError

    async def pause(self) -> None:
        """End the background task, and stop what is in flight with every token of it kept."""
        await self.stop()
        try:
            await self.interrupt()
        except EngineError as error:
            self.error = self.error or error

    def check(self) -> None:
        """Raise what ended the background task, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    async def _run(self) -> None:
        try:
            with UserCode():
                while True:
                    await self.settle()
                    self.fill()
                    if self.stalled:  # until somebody takes a step, or updates the weights
                        await asyncio.get_running_loop().create_future()
                    await self.poll()
        except Exception as error:
            self.error = error

    async def close(self) -> None:
        await self.stop()
        try:
            await self.interrupt()
        finally:  # after it: a turn or a sample that it ends begins a step of an environment, or a reward
            await self.rewards.close()
            if self.episodes is not None:
                await self.episodes.close()

    def begin(self, update_seconds: float | None) -> None:
        """A step begins with nothing in flight: all that is unfinished is submitted, and what lacks a reward scored."""
        self.open_stats()
        self.stats.batch.update_seconds = update_seconds
        self._resume = True
        self.retries.new_step()
        self.rewards.missing(self.state.buffer)
        for group in list(self.state.buffer):
            if failure := self._decide(group):
                raise RewardError.of(failure)

    def open_stats(self) -> None:
        """The account of the next step, with what attempts at it brought that were cut short."""
        plan, largest = self.state.admission.plan(self.params.rollout_batch_size), self.params.largest_target
        plan = plan if largest is None else replace(plan, target=min(plan.target, largest))
        self.stats = StepStats(plan, self.state.grown)
        self.stats.start()

    @property
    def target(self) -> int:
        """Groups to have under way now: as many as admission wants and the bound allows."""
        size, bound, wanted = self.params.rollout_batch_size, self.params.max_staleness, self.stats.batch.target
        return (
            wanted
            if bound is None
            else min(wanted, size * (bound + 1 - (self.next_train_version - self.state.engine_version)))
        )

    def fill(self) -> None:
        """A new prompt for each group that is missing; then everything unfinished is submitted, in its order.

        Raises:
            EngineError: an outage has lasted for too long, or samples of a step's worth of groups were given up.
        """
        due = self.retries.due(self.engine, self.flights, self.flight)
        self._give_up_samples()
        if self.retries.down:
            return
        buffer, target = self.state.buffer, self.target
        groups = list(buffer) if self._resume else []
        while len(buffer) - len(self._quarantined) < target:
            admitted = self.prompts.admit(buffer.admitted)
            if admitted is None:
                break
            self.history.apply(admitted)
            groups.append(buffer.groups[admitted.group_id])
        if groups:
            work = self.order(groups, self.state.lengths)
            self._submit([sample for sample in work if sample not in self.retries] if self.retries else work)
        self._resume = False
        if self._answered:
            answered, self._answered = self._answered, []
            self._submit([sample for sample in answered if sample.group_id in buffer.groups])  # not turned away since
        self._submit(due)

    def _submit(self, work: Iterable[Sample]) -> None:
        flying, quarantined, journal = self.flight.samples, self._quarantined, self.history.journal
        work = [s for s in work if s.finish is None and s.id not in flying and s.group_id not in quarantined]
        if self.episodes is not None:
            durable = None if journal is None else journal.drain
            for sample in work:
                if sample.awaits_environment:
                    self.episodes.begin(sample, self.state.buffer.group_of(sample), durable)
            work = [sample for sample in work if not sample.awaits_environment]
        self.flight.submit(self.engine, work, self.stats.now, self.stats.batch.request_intervals)

    async def poll(self, or_verdict: bool = False) -> None:
        """Wait for the next thing to happen: tokens, the answer of an environment, or a verdict that may decide about a
        group; any verdict if it is asked for."""
        before = self.stats.now
        if self.flight:
            try:
                ask = partial(self.flights.poll, self.engine, self.flight)
                chunks = await self.flight.poll(ask, self.retries.next(True), self._arrivals(or_verdict))
            finally:
                busy = self.engine.running / self.engine.capacity.slots
                self.stats.batch.occupancy += (self.stats.now - before) * busy
            self.absorb(chunks)
        elif self.episodes:
            await first_of(self._arrivals(or_verdict), self.retries.next(False))
            self.stats.batch.environment_wait_seconds += self.stats.now - before
        elif self.retries:
            await first_of(self._arrivals(or_verdict), self.retries.next(False))
        else:
            await self.await_reward()

    def _arrivals(self, or_verdict: bool) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What may come beside tokens that something follows from: verdicts, answers of environments."""
        waits = [self.rewards.wait] if len(self.rewards) > 0 and (self.state.scored or or_verdict) else []
        waits += [self.episodes.wait] if self.episodes else []
        return [*waits, self.retries.wait] if self.retries.controls else waits

    async def await_reward(self) -> None:
        before = self.stats.now
        await self.rewards.wait()
        self.stats.batch.reward_wait_seconds += self.stats.now - before

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Put what was sampled into its samples, then deal with those that ended."""
        now = self.stats.now
        tokens, ended, failed, complete, broken = self.history.absorb(chunks, self.flight.samples)
        self.stats.batch.sampled_tokens += tokens
        self.retries.received(chunks, self.flight.begun(chunks, now), self.flight.samples)
        for chunk in failed:
            self._failed(chunk, now)
        ids = [chunk[0] for chunk in ended]
        if self.episodes is None:
            finished = self.flight.end(ids, now, "finished")
        else:
            finished = self._turned(ids, now)
            self.episodes.drop(finished)
        for error in broken:
            if error.chunk.sample_id in self.flight.samples:
                self.flight.end([error.chunk.sample_id], now, "failed")  # what comes after it would leave a gap
        self._score(finished, complete)
        if broken:  # only now that every token of these chunks is in its sample
            raise broken[0]
        if self.on_progress is not None:
            self.on_progress()

    def _turned(self, ids: Sequence[str], now: float) -> list[Sample]:
        """Turns of episodes have ended, and their environments answer; or the episodes have, which are returned."""
        samples = self.flight.samples
        self._submit(self.flight.end([id for id in ids if samples[id].finish is None], now, "turn"))
        return self.flight.end([id for id in ids if id in samples], now, "finished")

    def _hear(self, episodes: Episodes) -> None:
        """What environments have answered: it happens, and their samples go on."""
        ended: list[Sample] = []
        complete: list[Group] = []
        hopeless = None
        for sample, group, event, failures in episodes.take():
            self.stats.batch.failures += failures
            if group.id not in self.state.buffer.groups or group.id in self._quarantined:
                continue
            if event is None:
                hopeless = self._give_up(group, Rejection.ENVIRONMENT, failures[-1].error) or hopeless
                continue
            self.history.apply(event)
            if sample.finish is None:
                self._answered.append(sample)
            else:
                ended.append(sample)
                if group.complete:
                    complete.append(group)
            if sample.finish is not None or not sample.transitions:
                self.engine.forget([sample.id])
        self._score(ended, complete)
        if hopeless is not None:  # only now that every answer is in its sample
            raise EpisodeError(f"environments keep failing; the last one: {hopeless}")

    def _score(self, finished: Sequence[Sample], complete: Sequence[Group]) -> None:
        """Start the rewards of samples that have finished, or of the groups that are complete with them."""
        if self.rewards.scope == "group":
            finished = [group.samples[-1] for group in complete]
        for sample in finished:
            if sample.group_id not in self._quarantined:
                self.rewards.finished(self.state.buffer.group_of(sample), sample)

    def _failed(self, chunk: Chunk, now: float) -> None:
        """Record that a request failed: its sample waits to go on from its last token."""
        group = self.state.buffer.group_of(self.flight.samples[chunk.sample_id])
        self.stats.batch.failures.append(Failure("engine", chunk.sample_id, group.prompt.id, chunk.error or ""))
        [sample] = self.flight.end([chunk.sample_id], now, "failed")
        if group.id not in self._quarantined:
            self.retries.failed(sample, chunk)

    def _give_up_samples(self) -> None:
        """Quarantine the groups of samples that have failed too often.

        Raises:
            EngineError: this has happened to a step's worth of groups.
        """
        hopeless = None
        for sample, error in self.retries.given_up():
            if self._give_up(self.state.buffer.group_of(sample), Rejection.ENGINE, error):
                hopeless = EngineError(
                    f"requests to the engine keep failing; the last one, sample {sample.id}: {error}"
                )
        if hopeless is not None:
            raise hopeless

    def _give_up(self, group: Group, reason: Rejection, error: str) -> str | None:
        """Quarantine a group; returns the error once that has happened to a step's worth of groups."""
        self._quarantine(group, reason, error)
        rejections = self.stats.batch.rejections
        given_up = len(self._quarantined) + sum(rejected is reason for _, rejected in rejections)
        return None if given_up < self.stats.batch.target else error

    def _quarantine(self, group: Group, reason: Rejection, error: str) -> None:
        """Leave a group out as soon as nothing of it runs."""
        self._quarantined.setdefault(group.id, Quarantine(group.id, group.prompt.id, reason, error))
        self.retries.forget(group.samples)
        self.rewards.forget(group)

    async def settle(self) -> None:
        """Wait for the journal if it is far behind; then give what environments answered and the verdicts that arrived
        to their samples, and let go of groups that cannot be trained on.

        Raises:
            RewardError: a reward function failed, and the run is set to stop when one does; or none can be computed
                any more, whatever is set.
            EpisodeError: environments keep failing.
            JournalError: the journal cannot be written.
        """
        if self.history.journal is not None:
            await self.history.journal.drain()
        if self.episodes is not None:
            self._hear(self.episodes)
        verdicts = self.rewards.take()
        failures = [self._judge(verdict) for verdict in verdicts]
        for id in list(self._quarantined):
            if not any(sample in self.flight for sample in self.state.buffer.groups[id].samples):
                quarantine = self._quarantined.pop(id)
                self.stats.batch.quarantined.append(quarantine)
                self._reject(self.state.buffer.groups[id], quarantine.reason)
        for verdict in verdicts:
            if verdict.hopeless:
                raise RewardError(f"no reward can be computed any more: {verdict.error}")
        for failure in filter(None, failures):
            raise RewardError.of(failure)

    def _judge(self, verdict: Verdict) -> Failure | None:
        """What a verdict means; the failure, if it ends the step."""
        group, samples, rewards = verdict.group, verdict.samples, verdict.rewards
        if group.id not in self.state.buffer.groups:
            return None
        if verdict.error is not None:
            failure = Failure(verdict.failure, samples[0].id, group.prompt.id, verdict.error)
            self.stats.batch.failures.append(failure)
            if self.faults.on_reward_error == "raise":
                return failure
            if self.faults.on_reward_error == "reject":
                self._quarantine(group, Rejection.REWARD, verdict.error)
                return None
            rewards = [Reward(0.0)] * len(samples)
        self.history.apply(Rewarded(group.id, {s.index: reward for s, reward in zip(samples, rewards, strict=True)}))
        return self._decide(group)

    def _decide(self, group: Group) -> Failure | None:
        """Ask the filter about a group as soon as it is complete and rewarded; the failure, if it ends the step."""
        if self.dynamic_filter is None or group.id in self.state.ready or group.id in self._quarantined:
            return None
        if not (group.complete and group.rewarded):
            return None
        try:
            with UserCode():
                accepted = bool(self.dynamic_filter(group))
        except Exception as error:
            failure = Failure("filter", group.samples[0].id, group.prompt.id, described(error))
            self.stats.batch.failures.append(failure)
            if self.faults.on_reward_error == "raise":
                return failure
            self._quarantine(group, Rejection.FILTER, failure.error)
            return None
        if accepted:
            self.history.apply(Accepted(group.id))
        else:
            self._reject(group, Rejection.FILTER)
        return None

    def _reject(self, group: Group, reason: Rejection) -> None:
        self.history.apply(Rejected(group.id, reason))
        if unfinished := [sample.id for sample in group.samples if sample.finish is None]:
            self.engine.forget(unfinished)
        if self.episodes is not None:
            self.episodes.drop(group.samples)
        limit, ready = self.faults.max_rejected_groups, len(self.state.ready)
        self.stats.reject(group, reason, limit, ready, self.params.rollout_batch_size)

    async def interrupt(self) -> None:
        """Stop what is in flight and keep every token of it; once begun, it is not given up half way."""
        try:
            if self.flight:
                await self._interrupt_flight()
        finally:
            await self.retries.stop()

    async def _interrupt_flight(self) -> None:
        cancelled = False
        try:
            try:
                chunks = await self.flight.interrupt(self.engine, self.retries.controls)
            except asyncio.CancelledError:
                cancelled = True
                again = asyncio.ensure_future(self.flight.interrupt(self.engine, self.retries.controls))
                await outlast(again)
                chunks = again.result()
            self.absorb(chunks)
        except EngineError:  # what it had handed out before is kept; a sample goes on behind it
            if late := self.flight.late():
                self.absorb(late)
            raise
        finally:
            self.flight.end_all(self.stats.now)
            self._resume = True
            if cancelled:
                raise asyncio.CancelledError
