"""Active partial rollouts: start more groups than a step needs, interrupt the rest once enough are complete, and go on
with them first in the next step (APRIL, arXiv 2509.18521).

Invariants:
- every admitted group is in exactly one place: under way (in flight, waiting or complete), trained on, or rejected;
- every token an engine hands out is appended to its sample before anything else happens, so an interrupt, a failing
  request or a dead engine loses nothing that was sampled;
- after `collect` returns or raises, nothing runs in the engine;
- no group is trained on more than `max_staleness` weight updates after its first token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from april.rollout.admission.auto import AutoAdmission
from april.rollout.admission.fixed import FixedAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.admission.ramp import RampedAdmission
from april.rollout.buffer import Rejection
from april.rollout.engine import Chunk, Engine, EngineError
from april.rollout.journal import Admitted, Journal, Rejected, Rewarded, Trained
from april.rollout.order import ORDERS
from april.rollout.params import FaultPolicy, RolloutParams
from april.rollout.retries import Retries
from april.rollout.rewards import GroupRewardFunction, RewardError, RewardFunction, RewardTasks
from april.rollout.staleness import select
from april.rollout.state import RolloutState
from april.rollout.step import Failure, Plan, Quarantine, Span, Step
from april.rollout.trajectory import Group, Prompt, Sample, SamplingParams


class RejectionError(Exception):
    """Too many groups of one step were turned away."""


EVALUATION = 1 << 48
"""Evaluation groups are numbered from here on, so that their samples' names and seeds never meet a training group's."""


class RolloutScheduler(RolloutState):
    """Collects training batches of complete groups from an engine, by active partial rollouts.

    Use it as an async context manager, call `collect` for each training step and `update_weights` after it.

    Args:
        engine: whatever generates.
        prompts: where new prompts come from. If it has `state_dict` and `load_state_dict`, its position is part of
            the scheduler's own state.
        reward: scores a finished sample, `reward(prompt, sample)`, or with `reward_scope="group"` a complete group,
            `reward(prompt, samples)`. Sync (run in a thread) or async.
        params: how many groups are under way, and which of them a step trains on.
        sampling: how tokens are drawn, and the response budget.
        faults: what is done about rewards and requests that fail.
        dynamic_filter: called with each complete, rewarded group; False turns it away, and a new prompt replaces it.
        seed: every sample's seed follows from it.
        on_progress: called with the scheduler whenever something was sampled or scored.
        journal: keeps what happens on disk. What it holds beyond the state that was loaded happens again first: the
            steps of it come out of `collect` as they did.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Iterable[Prompt],
        reward: RewardFunction | GroupRewardFunction,
        params: RolloutParams,
        *,
        sampling: SamplingParams | None = None,
        faults: FaultPolicy | None = None,
        reward_scope: Literal["sample", "group"] = "sample",
        dynamic_filter: Callable[[Group], bool] | None = None,
        seed: int = 0,
        on_progress: Callable[[RolloutScheduler], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        sampling, faults = sampling or SamplingParams(), faults or FaultPolicy()
        lengths = LengthModel.for_batch(sampling.max_tokens, params.rollout_batch_size * params.n_samples_per_prompt)
        admission = params.over_sampling_batch_size
        if admission == "auto":
            admission = AutoAdmission(engine, lengths, params.n_samples_per_prompt, params.max_staleness)
        elif isinstance(admission, int):
            admission = FixedAdmission(admission)
        if params.ramp_steps:
            admission = RampedAdmission(admission, params.ramp_steps)
        super().__init__(prompts, lengths, admission, params, faults, dynamic_filter, seed, journal)
        self.engine = engine
        self.sampling = sampling
        self.order = ORDERS[params.order] if isinstance(params.order, str) else params.order
        self.on_progress = on_progress
        self._rewards = RewardTasks(reward, reward_scope, faults.reward_timeout)
        self._flight: dict[str, tuple[Sample, Group, Span]] = {}
        self._retries = Retries(faults.max_retries, faults.retry_delay)
        self._doomed: dict[int, Quarantine] = {}
        self._missed: list[Chunk] = []
        """Sampled in the moment in which a step was cancelled."""
        self._resume = False
        """Something unfinished is not in flight."""
        self._step = Step(version=0, plan=Plan(params.rollout_batch_size))
        self._began = 0.0
        self._update_seconds: float | None = None

    async def __aenter__(self) -> RolloutScheduler:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._rewards.close()
        await self._interrupt()

    async def collect(self) -> Step:
        """Exactly `rollout_batch_size` complete, rewarded groups, oldest first, and the account of the step.

        Raises:
            RewardError: a reward function failed and `on_reward_error` is "raise".
            EngineError: the engine as a whole failed. Nothing sampled is lost; `collect` may be called again.
            JournalError: the journal cannot be written, or (DamageError) holds what cannot have happened.
            ValueError: a prompt does not fit the engine, or the prompts ran out.
        """
        if (step := self._replay()) is not None:
            return step
        self._begin()
        try:
            while True:
                if self.journal is not None:
                    await self.journal.room()
                self._settle()
                chosen = self._select()
                if chosen is None:
                    self._fill()
                    await self._advance()
                elif self._flight:
                    self._step.interrupted_at = self._now()
                    await self._interrupt()
                elif not all(group.rewarded for group in chosen):
                    await self._await_reward()
                else:
                    return self._finish(chosen)
        except BaseException:
            try:
                with suppress(EngineError):
                    await self._interrupt()
            finally:
                seen = (span for span in self._step.spans if span.after > span.before)
                self._cut_short = [replace(span, start=0.0, queued=None, end=0.0) for span in seen]
            raise

    async def update_weights(self, weights: Any = None) -> None:
        """Hand new weights to the engine; the policy's version goes up by one.

        Raises:
            StalenessError: a group under way could no longer be trained on within the bound; `collect` first.
        """
        self._check_bound(
            self.version + 1, "collect a step between two weight updates: not all groups can be trained on"
        )
        began = asyncio.get_running_loop().time()
        await self.engine.update_weights(self.version + 1, weights)
        self._update_seconds = asyncio.get_running_loop().time() - began
        self.version += 1

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples_per_prompt: int = 1, sampling: SamplingParams | None = None
    ) -> list[Group]:
        """Complete, unrewarded groups for `prompts`, past the buffer. The same prompts get the same seeds each time.

        Raises:
            EngineError: the engine failed, or a request of it did, more often than `max_retries`.
        """
        sampling = sampling or self.sampling
        groups = [
            Group.start(EVALUATION + i, prompt, n_samples_per_prompt, sampling, self.seed)
            for i, prompt in enumerate(prompts)
        ]
        unfinished = {sample.id: sample for group in groups for sample in group.samples}
        retries = Retries(self._retries.limit, self._retries.delay)
        try:
            for sample in unfinished.values():
                self.engine.submit(sample)
            while unfinished:
                if len(retries) == len(unfinished):
                    await asyncio.sleep(retries.next or 0)
                for chunk in await self._poll(retries):
                    sample = unfinished[chunk.sample_id]
                    sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
                    if chunk.token_ids:
                        retries.went_on(sample)
                    if chunk.finish is not None:
                        del unfinished[sample.id]
                    elif chunk.error is not None and not retries.failed(sample):
                        raise EngineError(f"evaluation sample {sample.id} kept failing: {chunk.error}")
                for sample in retries.due():
                    self.engine.submit(sample)
        finally:
            await self.engine.interrupt()
            self.engine.forget(sample.id for group in groups for sample in group.samples)
        return groups

    def state_dict(self) -> dict[str, Any]:
        assert not self._flight, "samples are in flight: their tokens are not all here yet"
        return super().state_dict()

    @property
    def step_tokens(self) -> int:
        """Tokens sampled in the current step so far."""
        return self._step.sampled_tokens

    @property
    def in_flight(self) -> int:
        """Samples submitted to the engine and not finished."""
        return len(self._flight)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    def _begin(self) -> None:
        self._began = asyncio.get_running_loop().time()
        plan = self.admission.plan(self.params.rollout_batch_size)
        largest = self.params.largest_target
        self._resume = True
        self._retries.hurry()
        self._step = Step(self.version, plan if largest is None else replace(plan, target=min(plan.target, largest)))
        self._step.update_seconds = self._update_seconds
        self._step.spans += self._cut_short
        self._cut_short = []
        self._rewards.missing(self.buffer)
        for group in list(self.buffer):
            if group.complete:
                self._weigh(group)

    def _select(self) -> list[Group] | None:
        params, ready = self.params, self.ready.values()
        size, bound = params.rollout_batch_size, params.max_staleness
        return select(self.buffer, ready, self.version, size, bound, params.first_come, params.admission_window)

    def _fill(self) -> None:
        """A new prompt for each group that is missing; then everything unfinished goes on, in the policy's order."""
        groups = list(self.buffer) if self._resume else []
        while len(self.buffer) - len(self._doomed) < self._step.target:
            prompt = next(self._prompts, None)
            if prompt is None:
                break
            group = Group.start(
                self.buffer.admitted, prompt, self.params.n_samples_per_prompt, self.sampling, self.seed
            )
            self.buffer.admit(group)
            if self.journal is not None:
                self._happened(Admitted(group.to_dict(), self._position()))
            groups.append(group)
        if groups:
            work = self.order(groups, self.lengths)
            self._submit([(g, s) for g, s in work if s not in self._retries] if self._retries else work)
        self._resume = False
        if self._retries:
            self._submit([(self.buffer.groups[sample.group_id], sample) for sample in self._retries.due()])

    def _submit(self, work: Iterable[tuple[Group, Sample]]) -> None:
        now, flight, spans, submit = self._now(), self._flight, self._step.spans, self.engine.submit
        for group, sample in work:
            if group.id in self._doomed or sample.id in flight:
                continue
            submit(sample)
            span = Span(sample.id, group.id, now, sample.length)
            flight[sample.id] = (sample, group, span)
            spans.append(span)

    async def _advance(self) -> None:
        """Wait for the next thing to happen: tokens, or a verdict that may decide about a group."""
        if self._flight:
            before = self._now()
            chunks = await self._poll(self._retries, self.can_reject and bool(self._rewards))
            self._step.occupancy += (self._now() - before) * self.engine.running / self.engine.capacity.slots
            self._absorb(chunks)
        elif self._rewards or self._retries:
            await self._await_reward(self._retries.next)
        else:
            raise ValueError(
                f"the prompts ran out: {len(self.ready)} complete groups where a step needs "
                f"{self.params.rollout_batch_size}"
            )

    async def _poll(self, retries: Retries, or_verdict: bool = False) -> list[Chunk]:
        """What the engine sampled next, or nothing if a sample is due again or a verdict arrived first."""
        if not retries and not or_verdict:
            return await self.engine.poll()
        poll = asyncio.ensure_future(self.engine.poll())
        first: set[asyncio.Future[Any]] = {poll, asyncio.ensure_future(self._rewards.wait())} if or_verdict else {poll}
        try:
            await asyncio.wait(first, timeout=retries.next, return_when=asyncio.FIRST_COMPLETED)
            await _end(first)
        except asyncio.CancelledError:
            await _end(first)
            if not poll.cancelled() and poll.exception() is None:  # it ended in the same moment, with tokens
                self._missed += [chunk for chunk in poll.result() if chunk.sample_id in self._flight]
            raise
        return [] if poll.cancelled() else poll.result()

    async def _await_reward(self, timeout: float | None = None) -> None:
        before = self._now()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rewards.wait()
        self._step.reward_wait_seconds += self._now() - before

    def _absorb(self, chunks: Sequence[Chunk]) -> None:
        now, flight, buffer, step = self._now(), self._flight, self.buffer, self._step
        rewards, retries = self._rewards, self._retries
        hopeless = None
        for chunk in chunks:
            id, token_ids, logprobs, version, finish, error = chunk
            sample, group, span = flight[id]
            before = sample.length
            sample.extend(token_ids, logprobs, version, finish)
            count = sample.length - before
            if self.journal is not None and (count or finish is not None):
                self.journal.record(chunk)
            if count:
                buffer.sampled_tokens += count
                step.sampled_tokens += count
                if span.queued is None:
                    span.queued, span.first_tokens = now - span.start, count
                    if retries.failures:
                        retries.went_on(sample)
            if finish is None and error is None:
                continue
            del flight[id]
            span.end, span.after, span.outcome = now, sample.length, "failed" if finish is None else "finished"
            if finish is None:
                hopeless = self._retry(sample, group, error or "") or hopeless
            elif group.complete:
                rewards.finished(group, sample)
                self._weigh(group)
            elif rewards.scope == "sample":
                rewards.finished(group, sample)
        if hopeless is not None:  # only now that every token of these chunks is in its sample
            raise hopeless
        if self.on_progress is not None:
            self.on_progress(self)

    def _retry(self, sample: Sample, group: Group, error: str) -> EngineError | None:
        """A request failed: the sample goes on from its last token after a while, or its group is quarantined.

        Returns the error that ends the step, once a step's worth of groups is quarantined."""
        self._step.failures.append(Failure("engine", sample.id, group.prompt.id, error))
        if group.id in self._doomed or self._retries.failed(sample):
            return None
        self._quarantine(group, Rejection.ENGINE, error)
        given_up = len(self._doomed) + sum(reason is Rejection.ENGINE for _, reason in self._step.rejections)
        if given_up < self._step.target:
            return None
        return EngineError(f"requests to the engine keep failing; the last one, sample {sample.id}: {error}")

    def _quarantine(self, group: Group, reason: Rejection, error: str) -> None:
        """Leave a group out as soon as nothing of it runs."""
        self._doomed.setdefault(group.id, Quarantine(group.id, group.prompt.id, reason, error))
        self._retries.forget(group.samples)

    def _settle(self) -> None:
        """Give the verdicts that arrived to their samples, and let go of groups that cannot be trained on."""
        failed = None
        for verdict in self._rewards.take():
            if verdict.group.id not in self.buffer.groups:
                continue
            if verdict.error is not None:
                failure = Failure(verdict.failure, verdict.samples[0].id, verdict.group.prompt.id, verdict.error)
                self._step.failures.append(failure)
                if self.faults.on_reward_error == "raise":
                    failed = failure
                    continue
                if self.faults.on_reward_error == "reject":
                    self._quarantine(verdict.group, Rejection.REWARD, verdict.error)
                    continue
            for sample, reward in zip(verdict.samples, verdict.rewards or [0.0] * len(verdict.samples), strict=True):
                sample.reward = reward
            self._happened(Rewarded(verdict.group.id, {s.index: s.reward or 0.0 for s in verdict.samples}))
            if verdict.group.complete:
                self._weigh(verdict.group)
        for id in list(self._doomed):
            if not any(sample.id in self._flight for sample in self.buffer.groups[id].samples):
                quarantine = self._doomed.pop(id)
                self._step.quarantined.append(quarantine)
                self._reject(self.buffer.groups[id], quarantine.reason)
        if failed is not None:
            raise RewardError(
                f"the reward function failed on sample {failed.sample_id} of prompt {failed.prompt_id!r}: "
                f'{failed.error}\nSet on_reward_error to "zero" or "reject" to go on without it.'
            )

    def _weigh(self, group: Group) -> None:
        """Decide about a complete group as soon as it can be decided: it is ready to be trained on, or turned away."""
        if group.id in self.ready or group.id in self._doomed:
            return
        if self.can_reject and not group.rewarded:
            return
        if self.dynamic_filter is not None and not self.dynamic_filter(group):
            self._reject(group, Rejection.FILTER)
        else:
            self.ready[group.id] = group

    def _reject(self, group: Group, reason: Rejection) -> None:
        self.buffer.reject(group, reason)
        if unfinished := [sample.id for sample in group.samples if sample.finish is None]:
            self.engine.forget(unfinished)
        self._happened(Rejected(group.id, reason))
        self._step.rejections.append((group.id, reason))
        limit = self.faults.max_rejected_groups
        if limit is not None and len(self._step.rejections) > limit:
            counts = Counter(reason for _, reason in self._step.rejections)
            raise RejectionError(
                f"{len(self._step.rejections)} groups of this step were turned away ({dict(counts)}) and only "
                f"{len(self.ready)} of {self.params.rollout_batch_size} can be trained on: make the task easier "
                "or harder, switch the filter off, or raise max_rejected_groups"
            )

    async def _interrupt(self) -> None:
        """Stop what is in flight and keep every token of it."""
        if not self._flight:
            return
        try:
            interrupted = await self.engine.interrupt()
            missed, self._missed = self._missed, []
            self._absorb([*missed, *interrupted])
        finally:
            now = self._now()
            for sample, _, span in self._flight.values():
                span.end, span.after = now, sample.length
            self._flight.clear()
            self._resume = True

    def _finish(self, chosen: list[Group]) -> Step:
        step = self._step
        self.buffer.train(chosen)
        for group in chosen:
            del self.ready[group.id]
        step.groups = chosen
        step.seconds = self._now()
        step.occupancy /= max(step.seconds, 1e-9)
        step.surplus_groups = sum(group.complete for group in self.buffer)
        step.buffered_groups = len(self.buffer)
        step.buffered_tokens = self.buffer.tokens
        self.buffer.check()
        self._happened(Trained([group.id for group in chosen], step))
        if self.journal is not None:
            self.journal.flush()  # without a point at which a cancelled `collect` could lose the step
        self._learn(step)
        bound = self.params.max_staleness
        assert bound is None or step.staleness.max() <= bound, "the staleness bound is broken"
        return step


async def _end(tasks: Collection[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
