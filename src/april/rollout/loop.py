"""The rollout loop: admit groups, generate their samples, score them, and reject groups that cannot be trained on.

The loop is in one of three states. It is *stopped*; or a caller *drives* it, by calling `settle`, `fill` and `poll` in
turn; or it *runs* in a background task, which does the same. `start` and `stop` begin and end the background task,
`pause` also interrupts the samples in flight, and `close` ends the loop.

Each iteration:
- `settle` applies the answers of environments and the rewards, and rejects groups;
- `fill` admits groups up to `target`, and submits the unfinished samples to the engine;
- `poll` waits for the next result, and appends the tokens to their samples.

Invariants:
- at any time either the background task drives the loop, or the caller does;
- with S the bound, at most N * (S + 1 - (`next_train_version` - `engine_version`)) groups are in the buffer: a group
  that begins now, at `engine_version`, can still be trained on in time after all others, counted from the next batch;
- N' limits the groups in the buffer. With `refill` it limits the groups that are not ready: while a caller waits for
  a batch, and during training for as many groups as the caller had to wait for in the last step. If it had not to
  wait, training is slower than generation; if the bound delayed a batch, old groups are what it waits for: in both
  cases, groups that begin earlier would only be staler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from april.rollout.batch import Plan
from april.rollout.buffer import Rejection
from april.rollout.engine import EngineError
from april.rollout.episodes.episodes import Episodes
from april.rollout.events import Rejected
from april.rollout.generation.generation import Generation
from april.rollout.generation.in_flight import InFlight, SharedEngine, outlast
from april.rollout.generation.quarantine import Quarantined
from april.rollout.history import History
from april.rollout.params import FaultSettings
from april.rollout.prompt_source import PromptSource
from april.rollout.request_interval import RequestInterval
from april.rollout.rewards import RewardTasks
from april.rollout.scoring import Scoring
from april.rollout.step_stats import StepStats
from april.rollout.trajectory.group import Group
from april.rollout.user_code.user_code import UserCode


class RolloutLoop:
    """Generates and scores the groups of a state.

    Args:
        shared: the engine.
        in_flight: the samples of this loop in the engine.
        history: applies and records the events.
        prompts: source of new groups.
        rewards: computes the rewards; None leaves samples unscored.
        faults: treatment of rewards and requests that fail.
        episodes: the environments that answer the policy's turns.
        dynamic_filter: called with each complete, rewarded group; False rejects it.
        on_progress: called whenever something was sampled.
        overlap: generation continues while the trainer trains, so batches since the last weight update count.
        give_up_limit: groups of one step that may be given up before the step fails; None for N'.

    Attributes:
        stats: statistics of the batch that is being collected.
        delayed: whether the staleness bound delays the batch that is collected, or has delayed the latest one.
        refill: whether a group starts whenever one is ready; with `overlap` by default.
        error: the error that ended the background task.
    """

    def __init__(
        self,
        shared: SharedEngine,
        in_flight: InFlight,
        history: History,
        prompts: PromptSource,
        rewards: RewardTasks | None,
        faults: FaultSettings,
        episodes: Episodes | None = None,
        dynamic_filter: Callable[[Group], bool] | None = None,
        on_progress: Callable[[], None] | None = None,
        overlap: bool = False,
        give_up_limit: int | None = None,
    ) -> None:
        self.history = history
        self.state = state = history.state
        self.params = state.params
        self.prompts = prompts
        self.faults = faults
        self.overlap = self.refill = overlap
        self.stats = StepStats(Plan(self.params.rollout_batch_size))
        self.quarantined = Quarantined(self._stop_work)
        self.scoring = Scoring(
            rewards, history, self.stats, self.quarantined, faults, dynamic_filter, reject=self._reject
        )
        self.generation = Generation(
            shared,
            in_flight,
            history,
            self.stats,
            self.quarantined,
            faults,
            episodes,
            self.scoring.on_finished,
            on_progress,
            give_up_limit,
        )
        self.delayed = self._was_delayed = False
        self._missing = 0
        """Groups that were not ready when the caller asked for the latest batch."""
        self.error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def next_train_version(self) -> int:
        """The policy version that is trained on the next batch."""
        return self.state.trainer_version if self.overlap else self.state.engine_version

    @property
    def target(self) -> int:
        """Groups to have in the buffer now: the smaller of the plan's target and the bound's limit."""
        size, bound, wanted = self.params.rollout_batch_size, self.params.max_staleness, self.stats.batch.target
        if self.refill and not (self.delayed or self._was_delayed):
            wanted += min(len(self.state.ready), self._missing if self.running else size)
        if bound is None:
            return wanted
        ahead = self.next_train_version - self.state.engine_version
        return min(wanted, size * (bound + 1 - ahead))

    @property
    def running(self) -> bool:
        """Whether the background task drives the loop."""
        return self._task is not None and self.error is None

    @property
    def stalled(self) -> bool:
        """Whether there is nothing to wait for: no token, environment, reward or retry."""
        return self.generation.idle and not len(self.scoring)

    def start(self) -> None:
        """Drive the loop in a background task."""
        assert self._task is None, "the loop runs already"
        self._task = asyncio.create_task(self._run(), name="generation")

    async def stop(self) -> None:
        """End the background task, and leave samples in flight. `error` is the error that ended it before, if any."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            # `outlast` has caught the cancellation of the caller, which must not be lost.
            if await outlast(task):
                raise asyncio.CancelledError

    async def pause(self) -> None:
        """End the background task, and interrupt the samples in flight; every token is kept."""
        await self.stop()
        try:
            await self.generation.interrupt()
        except EngineError as error:
            # The weights can still be updated. `next_batch` raises the error; an earlier error is the cause.
            self.error = self.error or error

    def raise_error(self) -> None:
        """Raise the error that ended the background task, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    async def close(self) -> None:
        await self.stop()
        try:
            await self.generation.interrupt()
        finally:  # after the interrupt: a turn or sample that it ends starts an environment or a reward
            await self.scoring.close()
            if self.generation.episodes is not None:
                await self.generation.episodes.close()

    async def _run(self) -> None:
        try:
            with UserCode():
                while True:
                    await self.settle()
                    self.fill()
                    if self.stalled:  # until a batch is taken, or the weights are updated
                        await asyncio.get_running_loop().create_future()
                    await self.poll()
        # No caller awaits this task: `raise_error` raises the error in the next `next_batch`.
        except Exception as error:
            self.error = error

    def begin_collecting(self) -> None:
        """A caller asks for a batch."""
        self.delayed, self._was_delayed = False, self.delayed
        self._missing = max(self.params.rollout_batch_size - len(self.state.ready), 0)

    def start_step(self, update_seconds: float | None = None) -> None:
        """Start the next step with nothing in flight.

        Raises:
            RewardError: the dynamic filter failed.
        """
        self._start_stats()
        self.stats.batch.update_seconds = update_seconds
        self.generation.start_step()
        self.scoring.start_step()

    def continue_in_background(self, carried: Sequence[RequestInterval]) -> None:
        """Start the next step with samples in flight, whose intervals are `carried`, and drive it in the background."""
        self._start_stats()
        self.stats.batch.request_intervals += carried
        self.start()

    def _start_stats(self) -> None:
        plan, largest = self.state.admission.plan(self.params.rollout_batch_size), self.params.largest_target
        # An `Admission` of the user need not respect the staleness bound.
        plan = plan if largest is None else replace(plan, target=min(plan.target, largest))
        self.stats.start_step(plan, self.state.grown)

    async def settle(self) -> None:
        """Wait for the journal if it is far behind; apply answers of environments and rewards; reject groups.

        Raises:
            RewardError: a reward function failed, and `on_reward_error` is "raise"; or no reward can be computed.
            EpisodeError: environments keep failing.
            RejectionError: too many groups of the step were rejected.
            JournalError: the journal cannot be written.
        """
        if self.history.journal is not None:
            await self.history.journal.drain()
        self.generation.take_answers()
        error = self.scoring.take_verdicts()
        for group, quarantine in self.quarantined.release(self.generation.in_flight):
            self.stats.batch.quarantined.append(quarantine)
            self._reject(group, quarantine.reason)
        # Last, so that the other rewards, the answers and the rejections are applied first.
        if error is not None:
            raise error

    def fill(self) -> None:
        """Admit groups up to `target`, and submit every sample that can continue.

        Raises:
            EngineError: an outage has lasted too long, or too many groups were given up.
        """
        # Before `down` is read: this takes the answer to a control request, which changes the state of the engine.
        due = self.generation.due_for_retry()
        if not self.generation.retries.down:
            self.generation.submit(self._admit(), due)

    def _admit(self) -> list[Group]:
        buffer, target, groups = self.state.buffer, self.target, []
        # Quarantined groups stay until nothing of them is in flight; their replacements need not wait for that.
        while len(buffer) - len(self.quarantined) < target:
            admitted = self.prompts.admit(buffer.admitted)
            if admitted is None:
                break
            self.history.apply(admitted)
            groups.append(buffer.groups[admitted.group_id])
        return groups

    async def poll(self, or_reward: bool = False) -> None:
        """Wait for the next result: tokens, an environment's answer, or a reward that may reject a group.

        Args:
            or_reward: return at any reward.
        """
        # A reward that can reject no group changes nothing in the engine, so the wait need not end for it.
        decisive = len(self.scoring) > 0 and (self.state.scored or or_reward)
        if not await self.generation.poll([self.scoring.wait] if decisive else []):
            await self.await_reward()

    async def await_reward(self) -> None:
        before = self.stats.now
        await self.scoring.wait()
        self.stats.batch.reward_wait_seconds += self.stats.now - before

    def _reject(self, group: Group, reason: Rejection) -> None:
        self.history.apply(Rejected(group.id, reason))
        self.generation.discard(group)
        # Counted last, because it may raise: the group has left the buffer by then, and its resources are free.
        limit, ready = self.faults.max_rejected_groups, len(self.state.ready)
        self.stats.add_rejection(group, reason, limit, ready, self.params.rollout_batch_size)

    def _stop_work(self, group: Group) -> None:
        self.generation.retries.forget(group.samples)
        self.scoring.forget(group)
