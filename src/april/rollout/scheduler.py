"""Active partial rollouts: start more groups than a step needs, interrupt the rest once enough are complete, and resume
them first in the next step (APRIL, arXiv 2509.18521); or go on with them while the trainer trains.

The scheduler drives a pump (`pump.py`) that fills the engine, polls it and settles what came, until a step may be
taken. `collect` then lets nothing run on, for engines that share their device with the trainer. `take` lets generation
go on, and `swap` interrupts it for as long as a weight update takes. What the rollouts are is the scheduler's `state`,
which nothing but an event changes; an event that happens is recorded in the journal.

Two numbers count policies: `version` is the one whose weights the engine holds, `trained` the one that training makes
of all that was handed to it, which is one more while it is at it. A step's own version is that of the policy that is
trained on it, and its staleness counts from there.

Invariants:
- every admitted group is in exactly one place: under way (in flight, waiting or complete), trained on, or rejected;
- whatever fails or is cancelled, nothing that was sampled is lost, and the call may be made again;
- after `collect` returns or raises nothing runs in the engine but an evaluation, and inside `paused` nothing does;
- no group is trained on more than `max_staleness` weight updates after its first token, whenever steps and updates
  come;
- an evaluation is of one policy: `swap` and `paused` wait for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Literal

from april.rollout.admission.auto import AutoAdmission
from april.rollout.admission.fixed import FixedAdmission
from april.rollout.admission.lengths import LengthModel
from april.rollout.admission.ramp import RampedAdmission
from april.rollout.buffer import Buffer
from april.rollout.engine import Engine, EngineError
from april.rollout.episodes import Episodes
from april.rollout.evaluation import complete
from april.rollout.events import Trained, Updated
from april.rollout.history import History
from april.rollout.journal import Journal
from april.rollout.params import FaultSettings, RolloutParams
from april.rollout.prompt_source import PromptSource
from april.rollout.pump import Pump
from april.rollout.retries import Retries
from april.rollout.rewards import GroupRewardFunction, RewardFunction, RewardTasks
from april.rollout.sampling import SamplingParams
from april.rollout.staleness import StalenessError, select
from april.rollout.state import RolloutState
from april.rollout.step import Step
from april.rollout.trajectory import Group, Prompt
from april.rollout.user_code import UserCode


class RolloutScheduler:
    """Collects training batches of complete groups from an engine, by active partial rollouts.

    Use it as an async context manager. Where engine and trainer share a device, call `collect` for each training step
    and `update_weights` after it; where each has its own, `take` and `swap`: the engine never waits for the trainer.

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
            steps of it come out of `collect` or `take` as they did.
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
        faults: FaultSettings | None = None,
        reward_scope: Literal["sample", "group"] = "sample",
        dynamic_filter: Callable[[Group], bool] | None = None,
        seed: int = 0,
        on_progress: Callable[[RolloutScheduler], None] | None = None,
        journal: Journal | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.sampling = sampling or SamplingParams()
        self.faults = faults or FaultSettings()
        self.journal = journal
        self.episodes = episodes
        if (episodes is not None) != (self.sampling.max_turns > 0):
            raise ValueError("max_turns: turns need an environment, and an environment needs turns (at least 1)")
        if params.redraft and episodes is not None:
            raise ValueError("redraft: what an environment answered cannot become a draft; keep the tokens instead")
        filtered = dynamic_filter is not None
        scored = filtered or self.faults.on_reward_error == "reject"
        self.state = _new_state(engine, params, self.sampling.max_tokens, filtered, scored)
        self._history = History(self.state, journal)
        self._source = PromptSource(prompts, params.n_samples_per_prompt, self.sampling, seed, journal is not None)
        self._pump = Pump(
            engine,
            self._history,
            self._source,
            RewardTasks(reward, reward_scope, self.faults.reward_timeout),
            self.faults,
            episodes,
            dynamic_filter,
            on_progress and partial(on_progress, self),
        )
        self._update_seconds: float | None = None
        self._policy_kept = asyncio.Lock()
        """Held by whoever needs the engine's weights to stay as they are, or changes them."""

    async def __aenter__(self) -> RolloutScheduler:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pump.close()

    @property
    def engine(self) -> Engine:
        """Whatever generates; another one may take its place while nothing is in flight."""
        return self._pump.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._pump.engine = engine

    @property
    def version(self) -> int:
        """The policy version that generates."""
        return self.state.version

    @property
    def trained(self) -> int:
        """The policy version that training makes of all that was handed to it."""
        return self.state.trained

    @property
    def seed(self) -> int:
        """Every sample's seed follows from it."""
        return self._source.seed

    @property
    def buffer(self) -> Buffer:
        """The groups under way, and the count of those that left."""
        return self.state.buffer

    @property
    def step_tokens(self) -> int:
        """Tokens sampled in the current step so far."""
        return self._pump.account.step.sampled_tokens

    @property
    def in_flight(self) -> int:
        """Samples submitted to the engine and not finished, those of an evaluation included."""
        return len(self._pump.flights)

    async def collect(self) -> Step:
        """Exactly `rollout_batch_size` complete, rewarded groups, oldest first, and the account of the step; afterwards
        nothing runs in the engine.

        Raises:
            RewardError: a reward function failed and `on_reward_error` is "raise".
            EngineError: the engine as a whole failed, answered no request for `outage_limit` seconds, or (ChunkError)
                broke a rule. Nothing sampled is lost and no group is rejected; `collect` may be called again.
            JournalError: the journal cannot be written, or (DamageError) holds what cannot have happened.
            ValueError: a prompt does not fit the engine, or the prompts ran out.
        """
        again = self._replay_step()
        if again is not None:
            return again
        async with self._driving() as pump:
            pump.overlaps &= self.trained > self.version
            while True:
                await pump.settle()
                chosen = self._select()
                if chosen is None:
                    await self._advance()
                elif pump.flight:
                    pump.account.step.interrupted_at = pump.account.now
                    await pump.interrupt()
                elif not all(group.rewarded for group in chosen):
                    await pump.await_reward()
                else:
                    return self._hand_over(chosen)

    async def take(self) -> Step:
        """What `collect` gives, as soon as it is there; generation goes on, also while the step is trained on.

        It goes on until the scheduler is left, `collect` is called, or something fails.

        Raises:
            what `collect` raises; and what went wrong beside training since the last call.
            StalenessError: the bound allows no further step before the weights are updated.
        """
        again = self._replay_step()
        if again is not None:
            if self._replay() is None:  # it was being trained on when the run died
                self._pump.overlaps = True
                self._pump.begin(None)
                self._pump.start()
            elif self.journal is not None:
                self.journal.step_back()
            return again
        async with self._driving() as pump:
            pump.overlaps = True
            while True:
                await pump.settle()
                chosen = self._select()
                if chosen is not None and all(group.rewarded for group in chosen):
                    carried = pump.flight.carry(pump.account.now)
                    step = self._hand_over(chosen)
                    pump.open_account()
                    pump.account.step.spans += carried
                    pump.start()
                    return step
                await self._advance(or_verdict=chosen is not None)

    @asynccontextmanager
    async def _driving(self) -> AsyncIterator[Pump]:
        """The pump, moved on by the caller. If that fails, nothing runs in the engine afterwards."""
        pump = self._pump
        going_on = pump.running
        try:
            await pump.stop()
            pump.check()
            if not going_on:
                await pump.interrupt()  # what a cancelled `swap` may have left
                pump.begin(self._update_seconds)
            with UserCode():
                yield pump
        except BaseException:
            with suppress(EngineError):
                await pump.interrupt()
            raise

    async def _advance(self, or_verdict: bool = False) -> None:
        """Fill the engine and wait for the next thing to happen."""
        pump, size = self._pump, self.params.rollout_batch_size
        pump.fill()
        if not pump.stalled:
            await pump.poll(or_verdict)
        elif len(self.buffer) < pump.target:
            raise ValueError(f"the prompts ran out: {len(self.state.ready)} complete groups where a step needs {size}")
        else:
            raise StalenessError(
                f"update the weights before another step is taken: policy {self.version} generates, policy "
                f"{self.trained} is in training, and max_staleness = {self.params.max_staleness} allows no more groups"
            )

    def _select(self) -> list[Group] | None:
        params, ready = self.params, self.state.ready.values()
        size, bound = params.rollout_batch_size, params.max_staleness
        return select(self.buffer, ready, self._pump.head, size, bound, params.first_come, params.admission_window)

    def _hand_over(self, chosen: list[Group]) -> Step:
        taken = {group.id for group in chosen}
        rest = [group for group in self.buffer if group.id not in taken]
        step = self._pump.account.close(self._pump.head, chosen, rest)
        bound = self.params.max_staleness
        assert bound is None or step.staleness.max() <= bound, "the staleness bound is broken"
        self._history.happen(Trained([group.id for group in chosen], step))
        if self.journal is not None:
            self.journal.flush()  # without a point at which a cancelled call could lose the step
        return step

    async def update_weights(self, weights: Any = None) -> None:
        """Hand new weights to the engine, in which nothing runs; the policy's version goes up by one.

        Raises:
            StalenessError: a group under way could no longer be trained on within the bound; `collect` first.
        """
        assert not self.in_flight, "samples are in flight: `swap` interrupts them for the update"
        version = self.version + 1
        match self._replay():
            case Updated() as again:
                await self._update(version, weights)
                self._history.again(again)
                return
            case Trained() as instead:
                raise self._history.out_of_turn(instead)
        if version > self.trained:
            otherwise = "collect a step between two weight updates: not all groups can be trained on"
            self.state.check_bound(version, otherwise)
        if self.params.redraft:
            await self._pump.rewards.close()  # of responses that become drafts
        await self._update(version, weights)
        self._history.happen(Updated(version))

    async def _update(self, version: int, weights: Any) -> None:
        began = asyncio.get_running_loop().time()
        await self.engine.update_weights(version, weights)
        self._update_seconds = asyncio.get_running_loop().time() - began

    async def swap(self, weights: Any = None) -> None:
        """`update_weights` in the midst of generation: it is interrupted, and goes on under the new weights."""
        async with self.paused():
            await self.update_weights(weights)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, nothing runs in the engine; afterwards generation goes on if it did before. `swap` is an update in
        here, and right behind it is the moment for `state_dict`."""
        async with self._policy_kept:
            pump, version = self._pump, self.version
            step, going_on = pump.account.step, pump.running
            interrupted_at = pump.account.now if going_on else None
            await pump.pause()
            yield
            if going_on:
                if self.version > version:
                    step.update_seconds, step.interrupted_at = self._update_seconds, interrupted_at
                    step.resumed_at = pump.account.now
                pump.start()

    async def rest(self) -> None:
        """Let generation beside training stop until the next step is asked for; nothing sampled is lost."""
        await self._pump.pause()

    async def load_weights(self, weights: Any = None) -> None:
        """Hand the current version's weights to the engine: after a restart, or to an engine that lost them."""
        await self.engine.update_weights(self.version, weights)

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples_per_prompt: int = 1, sampling: SamplingParams | None = None
    ) -> list[Group]:
        """Complete, unrewarded groups for `prompts`, past the buffer. The same prompts get the same seeds each time.
        Where generation goes on beside training it goes on beside this too, and `swap` waits for the end of it.

        Raises:
            EngineError: the engine failed or answered no request for `outage_limit` seconds, or a sample failed more
                often than `max_retries` while the engine worked.
        """
        sampling = sampling or self.sampling
        groups = [
            Group.start(i, prompt, n_samples_per_prompt, sampling, self.seed, evaluation=True)
            for i, prompt in enumerate(prompts)
        ]
        async with self._policy_kept:
            retries = Retries(self.faults.max_retries, self.faults.retry_delay, self.faults.outage_limit)
            apart = None if self.episodes is None else self.episodes.apart()  # one that does nothing now is falsy
            await complete(self.engine, groups, retries, apart, self._pump.flights)
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs, as JSON types. Call it between steps, and if they are taken inside `paused`."""
        assert not self.in_flight, "samples are in flight: their tokens are not all here yet"
        if self.journal is not None:
            self.journal.flush()
        return {
            "seed": self.seed,
            "state": self.state.state_dict(),
            "prompts": self._source.position,
            "journal": None if self.journal is None else self.journal.mark,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`: same groups, same tokens, same data position. `load_weights` comes next."""
        self._source.seed = state["seed"]
        self.state.load_state_dict(state["state"])
        self._source.go_to(state["prompts"])
        if self.journal is not None:
            self.journal.seek(state["journal"])

    def _replay(self) -> Trained | Updated | None:
        event = self._history.replay()
        self._source.go_to(self._history.prompts)
        return event

    def _replay_step(self) -> Step | None:
        """The next step of the journal, handed over again; None if there is none."""
        match self._replay():
            case Trained() as again:
                self.state.admission.plan(self.params.rollout_batch_size)  # it follows from what was observed
                self._history.again(again)
                return again.step
            case Updated() as instead:
                raise self._history.out_of_turn(instead)
        return None


def _new_state(engine: Engine, params: RolloutParams, max_tokens: int, filtered: bool, scored: bool) -> RolloutState:
    lengths = LengthModel.for_batch(max_tokens, params.rollout_batch_size * params.n_samples_per_prompt)
    admission = params.over_sampling_batch_size
    if admission == "auto":
        admission = AutoAdmission(engine, lengths, params.n_samples_per_prompt, params.max_staleness)
    elif isinstance(admission, int):
        admission = FixedAdmission(admission)
    if params.ramp_steps:
        admission = RampedAdmission(admission, params.ramp_steps)
    return RolloutState(params, lengths, admission, filtered, scored)
