"""Active partial rollouts: start more groups than a step needs, interrupt the rest once enough are complete, and resume
them first in the next step (APRIL, arXiv 2509.18521).

The scheduler is a pump: fill the engine, poll it, settle what came, take a step once one may be taken. What the
rollouts are is its `state`, which nothing but an event changes; an event that happens is recorded in the journal.

Invariants:
- every admitted group is in exactly one place: under way (in flight, waiting or complete), trained on, or rejected;
- every token an engine hands out is appended to its sample before anything else happens, so an interrupt, a failing
  request or a dead engine loses nothing that was sampled;
- after `collect` returns or raises, nothing runs in the engine;
- no group is trained on more than `max_staleness` weight updates after its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from april.rollout.account import Account
from april.rollout.admission.auto import AutoAdmission
from april.rollout.admission.fixed import FixedAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.admission.ramp import RampedAdmission
from april.rollout.buffer import Buffer, Rejection
from april.rollout.engine import Chunk, Engine, EngineError
from april.rollout.episodes import EpisodeError, Episodes
from april.rollout.evaluation import complete
from april.rollout.events import Accepted, Admitted, Rejected, Rewarded, Trained, Updated
from april.rollout.flight import Flight, first_of
from april.rollout.history import History
from april.rollout.journal import Journal
from april.rollout.order import ORDERS
from april.rollout.params import FaultPolicy, RolloutParams
from april.rollout.retries import Retries
from april.rollout.rewards import GroupRewardFunction, RewardError, RewardFunction, RewardTasks, Verdict
from april.rollout.staleness import select
from april.rollout.state import RolloutState
from april.rollout.step import Failure, Plan, Quarantine, Step
from april.rollout.trajectory import Group, Prompt, Reward, Sample, SamplingParams


class RolloutScheduler:
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
        episodes: the environments that answer the policy's turns; `sampling.max_turns` then says how many there may be.
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
        episodes: Episodes | None = None,
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.params = params
        self.sampling = sampling or SamplingParams()
        self.faults = faults or FaultPolicy()
        self.dynamic_filter = dynamic_filter
        self.seed = seed
        self.on_progress = on_progress
        self.journal = journal
        self.episodes = episodes
        if (episodes is not None) != (self.sampling.max_turns > 0):
            raise ValueError("max_turns: turns need an environment, and an environment needs turns (at least 1)")
        self.state = self._new_state()
        self._history = History(self.state, journal)
        self._order = ORDERS[params.order] if isinstance(params.order, str) else params.order
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._rewards = RewardTasks(reward, reward_scope, self.faults.reward_timeout)
        self._retries = Retries(self.faults.max_retries, self.faults.retry_delay)
        self._flight = Flight()
        self._quarantined: dict[int, Quarantine] = {}
        """Groups to turn away as soon as nothing of them is in flight."""
        self._resume = False
        """Something unfinished is not in flight."""
        self._answered: list[tuple[Group, Sample]] = []
        """Samples whose environment has answered, to be submitted next."""
        self._account = Account(Plan(params.rollout_batch_size))
        self._update_seconds: float | None = None

    def _new_state(self) -> RolloutState:
        params, tokens = self.params, self.sampling.max_tokens
        lengths = LengthModel.for_batch(tokens, params.rollout_batch_size * params.n_samples_per_prompt)
        admission = params.over_sampling_batch_size
        if admission == "auto":
            admission = AutoAdmission(self.engine, lengths, params.n_samples_per_prompt, params.max_staleness)
        elif isinstance(admission, int):
            admission = FixedAdmission(admission)
        if params.ramp_steps:
            admission = RampedAdmission(admission, params.ramp_steps)
        filtered = self.dynamic_filter is not None
        return RolloutState(params, lengths, admission, filtered, filtered or self.faults.on_reward_error == "reject")

    async def __aenter__(self) -> RolloutScheduler:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._rewards.close()
        if self.episodes is not None:
            await self.episodes.close()
        await self._interrupt()

    @property
    def version(self) -> int:
        """The policy version that generates."""
        return self.state.version

    @property
    def buffer(self) -> Buffer:
        """The groups under way, and the count of those that left."""
        return self.state.buffer

    @property
    def step_tokens(self) -> int:
        """Tokens sampled in the current step so far."""
        return self._account.step.sampled_tokens

    @property
    def in_flight(self) -> int:
        """Samples submitted to the engine and not finished."""
        return len(self._flight)

    async def collect(self) -> Step:
        """Exactly `rollout_batch_size` complete, rewarded groups, oldest first, and the account of the step.

        Raises:
            RewardError: a reward function failed and `on_reward_error` is "raise".
            EngineError: the engine as a whole failed, or (ChunkError) broke a rule. Nothing sampled is lost; `collect`
                may be called again.
            JournalError: the journal cannot be written, or (DamageError) holds what cannot have happened.
            ValueError: a prompt does not fit the engine, or the prompts ran out.
        """
        match self._replay():
            case Trained() as again:
                return self._take_again(again)
            case Updated() as instead:
                raise self._history.out_of_turn(instead)
        self._begin()
        try:
            while True:
                if self.journal is not None:
                    await self.journal.drain()
                self._settle()
                chosen = self._select()
                if chosen is None:
                    self._fill()
                    await self._poll()
                elif self._flight:
                    self._account.step.interrupted_at = self._account.now
                    await self._interrupt()
                elif not all(group.rewarded for group in chosen):
                    await self._await_reward()
                else:
                    return self._take(chosen)
        except BaseException:
            with suppress(EngineError):
                await self._interrupt()
            raise

    async def update_weights(self, weights: Any = None) -> None:
        """Hand new weights to the engine; the policy's version goes up by one.

        Raises:
            StalenessError: a group under way could no longer be trained on within the bound; `collect` first.
        """
        version = self.version + 1
        match self._replay():
            case Updated() as again:
                await self._update(version, weights)
                self._history.again(again)
                return
            case Trained() as instead:
                raise self._history.out_of_turn(instead)
        otherwise = "collect a step between two weight updates: not all groups can be trained on"
        self.state.check_bound(version, otherwise)
        await self._update(version, weights)
        self._history.happen(Updated(version))

    async def _update(self, version: int, weights: Any) -> None:
        began = asyncio.get_running_loop().time()
        await self.engine.update_weights(version, weights)
        self._update_seconds = asyncio.get_running_loop().time() - began

    async def load_weights(self, weights: Any = None) -> None:
        """Hand the current version's weights to the engine: after a restart, or to an engine that lost them."""
        await self.engine.update_weights(self.version, weights)

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples_per_prompt: int = 1, sampling: SamplingParams | None = None
    ) -> list[Group]:
        """Complete, unrewarded groups for `prompts`, past the buffer. The same prompts get the same seeds each time.

        Raises:
            EngineError: the engine failed, or a request of it did, more often than `max_retries`.
        """
        sampling = sampling or self.sampling
        groups = [
            Group.start(i, prompt, n_samples_per_prompt, sampling, self.seed, evaluation=True)
            for i, prompt in enumerate(prompts)
        ]
        retries = Retries(self.faults.max_retries, self.faults.retry_delay)
        await complete(self.engine, groups, retries, self.episodes and self.episodes.apart())
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs, as JSON types. Call it between steps, never while `collect` runs."""
        assert not self._flight, "samples are in flight: their tokens are not all here yet"
        if self.journal is not None:
            self.journal.flush()
        return {
            "seed": self.seed,
            "state": self.state.state_dict(),
            "prompts": self._position(),
            "journal": None if self.journal is None else self.journal.mark,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`: same groups, same tokens, same data position. `load_weights` comes next."""
        self.seed = state["seed"]
        self.state.load_state_dict(state["state"])
        self._go_to(state["prompts"])
        if self.journal is not None:
            self.journal.seek(state["journal"])

    def _position(self) -> Any:
        """The place in the prompts, if they know it."""
        return self.prompts.state_dict() if hasattr(self.prompts, "state_dict") else None

    def _go_to(self, position: Any) -> None:
        if position is not None:
            self.prompts.load_state_dict(position)  # type: ignore[attr-defined]
            self._prompts = iter(self.prompts)

    def _replay(self) -> Trained | Updated | None:
        event = self._history.replay()
        self._go_to(self._history.prompts)
        return event

    def _take_again(self, trained: Trained) -> Step:
        if trained.step.version == self.version:
            self.state.admission.plan(self.params.rollout_batch_size)  # it follows from what was observed
        self._history.again(trained)
        return trained.step

    def _begin(self) -> None:
        plan = self.state.admission.plan(self.params.rollout_batch_size)
        largest = self.params.largest_target
        self._resume = True
        self._retries.clear()
        plan = plan if largest is None else replace(plan, target=min(plan.target, largest))
        self._account = Account(plan, self.state.grown)
        self._account.start()
        self._account.step.update_seconds = self._update_seconds
        self._rewards.missing(self.buffer)
        for group in list(self.buffer):
            self._decide(group)

    def _select(self) -> list[Group] | None:
        params, ready = self.params, self.state.ready.values()
        size, bound = params.rollout_batch_size, params.max_staleness
        return select(self.buffer, ready, self.version, size, bound, params.first_come, params.admission_window)

    def _fill(self) -> None:
        """A new prompt for each group that is missing; then everything unfinished is submitted, in its order."""
        groups = list(self.buffer) if self._resume else []
        while len(self.buffer) - len(self._quarantined) < self._account.step.target:
            prompt = next(self._prompts, None)
            if prompt is None:
                break
            groups.append(self._admit(prompt))
        if groups:
            work = self._order(groups, self.state.lengths)
            self._submit([(g, s) for g, s in work if s not in self._retries] if self._retries else work)
        self._resume = False
        if self._answered:
            answered, self._answered = self._answered, []
            self._submit(answered)
        if self._retries:
            self._submit([(self.buffer.groups[sample.group_id], sample) for sample in self._retries.due()])

    def _admit(self, prompt: Prompt) -> Group:
        id, position = self.buffer.admitted, None if self.journal is None else self._position()
        self._history.happen(Admitted(id, prompt, self.params.n_samples_per_prompt, self.sampling, self.seed, position))
        return self.buffer.groups[id]

    def _submit(self, work: Iterable[tuple[Group, Sample]]) -> None:
        now, flight, spans = self._account.now, self._flight, self._account.step.spans
        for group, sample in work:
            if group.id in self._quarantined or sample in flight:
                continue
            if self.episodes is not None and sample.awaits_environment:
                self.episodes.begin(sample, group, None if self.journal is None else self.journal.drain)
            elif sample.finish is None:
                spans.append(flight.submit(self.engine, sample, group, now))

    async def _poll(self) -> None:
        """Wait for the next thing to happen: tokens, or a verdict that may decide about a group."""
        if self._flight:
            before = self._account.now
            chunks = await self._flight.poll(self.engine, self._retries.next, self._arrivals())
            busy = self.engine.running / self.engine.capacity.slots
            self._account.step.occupancy += (self._account.now - before) * busy
            self._absorb(chunks)
        elif self.episodes:
            before = self._account.now
            await first_of([*self._arrivals(), self.episodes.wait], self._retries.next)
            self._account.step.environment_wait_seconds += self._account.now - before
        elif self._rewards or self._retries:
            await self._await_reward(self._retries.next)
        else:
            raise ValueError(
                f"the prompts ran out: {len(self.state.ready)} complete groups where a step needs "
                f"{self.params.rollout_batch_size}"
            )

    def _arrivals(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What may come beside tokens that something follows from: verdicts that decide, answers of environments."""
        rewards = [self._rewards.wait] if self.state.scored and len(self._rewards) > 0 else []
        return [*rewards, self.episodes.wait] if self.episodes else rewards

    async def _await_reward(self, timeout: float | None = None) -> None:
        before = self._account.now
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rewards.wait()
        self._account.step.reward_wait_seconds += self._account.now - before

    def _absorb(self, chunks: Sequence[Chunk]) -> None:
        """Put what was sampled into its samples, then deal with those that ended."""
        now = self._account.now
        tokens, ended, broken = self._history.absorb(chunks, self._flight.samples)
        self._account.step.sampled_tokens += tokens
        for sample in self._flight.begun(chunks, now):
            self._retries.went_on(sample)
        hopeless: EngineError | None = broken[0] if broken else None
        finished = []
        for chunk in ended:
            if chunk.finish is None:
                hopeless = self._failed(chunk, now) or hopeless
            elif self.episodes is None:
                finished.append(self._flight.end(chunk.sample_id, now, "finished"))
            else:
                finished += self._turned(chunk, now)
        for error in broken:
            if error.chunk.sample_id in self._flight.samples:
                self._flight.end(error.chunk.sample_id, now, "failed")  # what comes after it would leave a gap
        if self.episodes is not None:
            self.episodes.drop([sample for sample, _ in finished])
        self._score(finished)
        if hopeless is not None:  # only now that every token of these chunks is in its sample
            raise hopeless
        if self.on_progress is not None:
            self.on_progress(self)

    def _turned(self, chunk: Chunk, now: float) -> list[tuple[Sample, Group]]:
        """An episode's turn has ended, and its environment answers; or the episode has, which is returned."""
        sample, group = self._flight.samples[chunk.sample_id][:2]
        if sample.finish is None:
            self._flight.end(sample.id, now, "turn")
            self._submit([(group, sample)])
            return []
        return [self._flight.end(sample.id, now, "finished")]

    def _hear(self) -> None:
        """What environments have answered: it happens, and their samples go on."""
        assert self.episodes is not None
        ended, hopeless = [], None
        for sample, group, event, failures in self.episodes.take():
            self._account.step.failures += failures
            if group.id not in self.buffer.groups or group.id in self._quarantined:
                continue
            if event is None:
                hopeless = self._give_up(group, Rejection.ENVIRONMENT, failures[-1].error) or hopeless
                continue
            self._history.happen(event)
            if sample.finish is None:
                self._answered.append((group, sample))
            else:
                ended.append((sample, group))
            if sample.finish is not None or not sample.transitions:
                self.engine.forget([sample.id])
        self._score(ended)
        if hopeless is not None:  # only now that every answer is in its sample
            raise EpisodeError(f"environments keep failing; the last one: {hopeless}")

    def _score(self, finished: Sequence[tuple[Sample, Group]]) -> None:
        """Start the rewards of samples that have finished, or of the groups that they complete."""
        if self._rewards.scope == "sample":
            for sample, group in finished:
                self._rewards.finished(group, sample)
        else:
            for group in {group.id: group for _, group in finished if group.complete}.values():
                self._rewards.finished(group, group.samples[-1])

    def _failed(self, chunk: Chunk, now: float) -> EngineError | None:
        """A request failed: the sample goes on from its last token after a while, or its group is quarantined.

        Returns the error that ends the step, once a step's worth of groups is quarantined."""
        error, prompt = chunk.error or "", self._flight.samples[chunk.sample_id][1].prompt
        self._account.step.failures.append(Failure("engine", chunk.sample_id, prompt.id, error))
        if chunk.recovered:
            return None
        sample, group = self._flight.end(chunk.sample_id, now, "failed")
        if group.id in self._quarantined or self._retries.failed(sample):
            return None
        if not self._give_up(group, Rejection.ENGINE, error):
            return None
        return EngineError(f"requests to the engine keep failing; the last one, sample {sample.id}: {error}")

    def _give_up(self, group: Group, reason: Rejection, error: str) -> str | None:
        """Quarantine a group; returns the error once that has happened to a step's worth of groups."""
        self._quarantine(group, reason, error)
        rejections = self._account.step.rejections
        given_up = len(self._quarantined) + sum(rejected is reason for _, rejected in rejections)
        return None if given_up < self._account.step.target else error

    def _quarantine(self, group: Group, reason: Rejection, error: str) -> None:
        """Leave a group out as soon as nothing of it runs."""
        self._quarantined.setdefault(group.id, Quarantine(group.id, group.prompt.id, reason, error))
        self._retries.forget(group.samples)

    def _settle(self) -> None:
        """Give the verdicts that arrived to their samples, and let go of groups that cannot be trained on."""
        if self.episodes is not None:
            self._hear()
        failures = [self._judge(verdict) for verdict in self._rewards.take()]
        for id in list(self._quarantined):
            if not any(sample in self._flight for sample in self.buffer.groups[id].samples):
                quarantine = self._quarantined.pop(id)
                self._account.step.quarantined.append(quarantine)
                self._reject(self.buffer.groups[id], quarantine.reason)
        for failure in filter(None, failures):
            raise RewardError(
                f"the reward function failed on sample {failure.sample_id} of prompt {failure.prompt_id!r}: "
                f'{failure.error}\nSet on_reward_error to "zero" or "reject" to go on without it.'
            )

    def _judge(self, verdict: Verdict) -> Failure | None:
        """What a verdict means; the failure, if it ends the step."""
        group, samples, rewards = verdict.group, verdict.samples, verdict.rewards
        if group.id not in self.buffer.groups:
            return None
        if verdict.error is not None:
            failure = Failure(verdict.failure, samples[0].id, group.prompt.id, verdict.error)
            self._account.step.failures.append(failure)
            if self.faults.on_reward_error == "raise":
                return failure
            if self.faults.on_reward_error == "reject":
                self._quarantine(group, Rejection.REWARD, verdict.error)
                return None
            rewards = [Reward(0.0)] * len(samples)
        self._history.happen(Rewarded(group.id, {s.index: reward for s, reward in zip(samples, rewards, strict=True)}))
        self._decide(group)
        return None

    def _decide(self, group: Group) -> None:
        """Ask the filter about a group as soon as it is complete and rewarded."""
        if self.dynamic_filter is None or group.id in self.state.ready or group.id in self._quarantined:
            return
        if group.complete and group.rewarded:
            if self.dynamic_filter(group):
                self._history.happen(Accepted(group.id))
            else:
                self._reject(group, Rejection.FILTER)

    def _reject(self, group: Group, reason: Rejection) -> None:
        self._history.happen(Rejected(group.id, reason))
        if unfinished := [sample.id for sample in group.samples if sample.finish is None]:
            self.engine.forget(unfinished)
        if self.episodes is not None:
            self.episodes.drop(group.samples)
        limit, ready = self.faults.max_rejected_groups, len(self.state.ready)
        self._account.reject(group, reason, limit, ready, self.params.rollout_batch_size)

    async def _interrupt(self) -> None:
        """Stop what is in flight and keep every token of it."""
        if not self._flight:
            return
        try:
            self._absorb(await self._flight.interrupt(self.engine))
        finally:
            self._flight.end_all(self._account.now)
            self._resume = True

    def _take(self, chosen: list[Group]) -> Step:
        """Hand a step over, at the version that generates now."""
        taken = {group.id for group in chosen}
        rest = [group for group in self.buffer if group.id not in taken]
        step = self._account.close(self.version, chosen, rest)
        bound = self.params.max_staleness
        assert bound is None or step.staleness.max() <= bound, "the staleness bound is broken"
        self._history.happen(Trained([group.id for group in chosen], step))
        if self.journal is not None:
            self.journal.flush()  # without a point at which a cancelled `collect` could lose the step
        return step
