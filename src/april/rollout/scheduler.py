"""Active partial rollouts: start more groups than a step needs, interrupt the rest once enough are complete, and resume
them first in the next step (APRIL, arXiv 2509.18521). With `overlap`, generation continues while the trainer trains.

The scheduler drives a rollout loop (`loop.py`), which fills the engine, polls it and processes the results, until a
training batch can be taken. Only events change the `state` of the rollouts; each event is recorded in the journal.

Two policy versions are counted: `engine_version` is the version of the engine's weights, and `trainer_version` is the
version that results from training on every batch returned so far. `trainer_version` is ahead of `engine_version` while
the trainer trains. A batch has the version of the policy that is trained on it; its staleness counts from there.

Invariants:
- every admitted group is in exactly one place: in the buffer (in flight, waiting or complete), trained on, or rejected;
- no error and no cancellation loses a sampled token, and the failed call may be repeated;
- without `overlap`, nothing but an evaluation runs in the engine after `next_batch` returns or raises; inside `pause`,
  nothing runs in the engine at all;
- no group is trained on more than `max_staleness` weight updates after its first token, in whatever order batches are
  taken and weights updated;
- an evaluation uses one policy version: `pause` and `update_weights` wait until it has ended.
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
from april.rollout.batch import RolloutBatch
from april.rollout.buffer import Buffer
from april.rollout.engine import Engine, EngineError
from april.rollout.episodes.episodes import Episodes
from april.rollout.evaluation import evaluate
from april.rollout.events import Trained, Updated
from april.rollout.generation.in_flight import SharedEngine
from april.rollout.history import History
from april.rollout.journal.journal import Journal
from april.rollout.loop import RolloutLoop
from april.rollout.params import FaultSettings, RolloutParams
from april.rollout.prompt_source import PromptSource
from april.rollout.rewards import GroupRewardFunction, RewardFunction, RewardTasks
from april.rollout.sampling import SamplingParams
from april.rollout.staleness import StalenessError, select
from april.rollout.state import RolloutState
from april.rollout.stop_strings import Decode
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.user_code.user_code import UserCode


class RolloutScheduler:
    """Collects training batches of complete groups from an engine, by active partial rollouts.

    Use it as an async context manager. Call `next_batch` for each training step, and `update_weights` after it.

    Args:
        engine: the inference engine.
        prompts: source of new prompts. If it has `state_dict` and `load_state_dict`, its position is part of
            the scheduler's own state.
        reward: scores a finished sample, `reward(prompt, sample)`, or with `reward_scope="group"` a complete group,
            `reward(prompt, samples)`. A plain function runs in a thread; it may also be async.
        params: how many groups are generated at once, and which of them a step trains on.
        sampling: sampling parameters and the response budget.
        faults: treatment of rewards and requests that fail.
        dynamic_filter: called with each complete, rewarded group; False rejects it, and a new prompt replaces it.
        seed: seed of the run, from which the seed of every sample follows.
        on_progress: called with the scheduler whenever something was sampled or scored.
        journal: records every event on disk. Events that it holds beyond the loaded state are replayed first:
            `next_batch` returns their batches again, unchanged.
        episodes: environments that answer the policy's turns, at most `sampling.max_turns` of them.
        overlap: generation continues while the trainer trains, and `update_weights` interrupts it only for the update.
            Choose it where the engine has devices of its own. Without it, the engine is idle between `next_batch`
            calls, so that engine and trainer can share a device.
        sample_type: class of the samples; a simulation has one that counts tokens without storing them.
        decode: text of token ids, special tokens included. Needed for stop strings (`sampling.stop`); programs bring
            their own.
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
        overlap: bool = False,
        sample_type: type[Sample] = Sample,
        decode: Decode | None = None,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.sampling = sampling or SamplingParams()
        self.faults = faults or FaultSettings()
        self.journal = journal
        self.episodes = episodes
        self.overlap = overlap
        if (episodes is not None) != (self.sampling.max_turns > 0):
            raise ValueError("max_turns: turns need an environment, and an environment needs turns (at least 1)")
        if params.redraft and episodes is not None:
            raise ValueError("redraft: what an environment answered cannot become a draft; keep the tokens instead")
        if decode is None and episodes is not None:
            decode = episodes.decode
        self._shared = SharedEngine(engine, decode)
        self._shared.check(self.sampling)
        filtered = dynamic_filter is not None
        scored = filtered or self.faults.on_reward_error == "reject"
        self.state = _new_state(engine, params, self.sampling.max_tokens, filtered, scored, sample_type)
        self._history = History(self.state, journal)
        self._source = PromptSource(prompts, params.n_samples_per_prompt, self.sampling, seed, journal is not None)
        self._loop = RolloutLoop(
            self._shared,
            self._shared.rollouts,
            self._history,
            self._source,
            RewardTasks(reward, reward_scope, self.faults.reward_timeout),
            self.faults,
            episodes,
            dynamic_filter,
            on_progress and partial(on_progress, self),
            overlap,
        )
        self._update_seconds: float | None = None
        self._weights_lock = asyncio.Lock()
        """Serialises evaluations with pauses and weight updates."""
        self._update_lock = asyncio.Lock()
        """Serialises the weight updates of a pause."""
        self._paused = False

    async def __aenter__(self) -> RolloutScheduler:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._loop.close()

    @property
    def engine(self) -> Engine:
        """The inference engine. It may be replaced while nothing is in flight."""
        return self._shared.given

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._shared.replace(engine)

    @property
    def refill(self) -> bool:
        """Whether a group starts whenever one is ready, so that N' limits the groups that are not ready: with `overlap`
        by default. Without `overlap` it keeps the engine full for longer, and groups are staler."""
        return self._loop.refill

    @refill.setter
    def refill(self, refill: bool) -> None:
        self._loop.refill = refill

    @property
    def engine_version(self) -> int:
        """The policy version of the engine's weights."""
        return self.state.engine_version

    @property
    def trainer_version(self) -> int:
        """The policy version that results from training on every batch returned so far."""
        return self.state.trainer_version

    @property
    def seed(self) -> int:
        """Seed of the run, from which the seed of every sample follows."""
        return self._source.seed

    @property
    def buffer(self) -> Buffer:
        """The groups that were admitted and have not been trained on or rejected, and counts of the others."""
        return self.state.buffer

    @property
    def step_tokens(self) -> int:
        """Tokens sampled in the current step so far."""
        return self._loop.stats.batch.sampled_tokens

    @property
    def in_flight(self) -> int:
        """Samples in the engine, including samples of an evaluation."""
        return len(self._shared)

    async def next_batch(self, last: bool = False) -> RolloutBatch:
        """Return `rollout_batch_size` complete, rewarded groups, oldest first, with the step's statistics.

        Args:
            last: no batch follows: generation ends even with `overlap`.

        Raises:
            RewardError: a reward function failed and `on_reward_error` is "raise".
            EngineError: the engine as a whole failed, answered no request for `outage_limit` seconds, or (ChunkError)
                broke a rule. Nothing sampled is lost and no group is rejected; `next_batch` may be called again.
            StalenessError: the bound allows no further batch before the weights are updated.
            JournalError: the journal cannot be written, or (DamageError) contains an impossible event.
            ValueError: a prompt does not fit the engine, or the prompts ran out.
            Exception: the error that ended generation since the last call.
        """
        generate_on = self.overlap and not last
        replayed = self._replay_batch()
        if replayed is not None:
            if generate_on and not self._loop.running:
                self._generate_after_replay()
            return replayed
        async with self._collecting() as loop:
            while True:
                await loop.settle()
                chosen = self._select()
                rewarded = chosen is not None and all(group.rewarded for group in chosen)
                # With overlap, generation continues while the chosen groups wait for their rewards.
                if chosen is None or (generate_on and not rewarded):
                    await self._advance(or_reward=chosen is not None)
                elif loop.generation.in_flight and not generate_on:
                    # The interrupt returns tokens, which may complete older groups: the next iteration selects again.
                    loop.stats.batch.interrupted_at = loop.stats.now
                    await loop.generation.interrupt()
                elif not rewarded:
                    await loop.await_reward()
                else:
                    return self._hand_over(chosen, generate_on)

    @asynccontextmanager
    async def _collecting(self) -> AsyncIterator[RolloutLoop]:
        """Let the caller drive the loop. If the block fails, nothing runs in the engine afterwards."""
        loop = self._loop
        generating = loop.running
        try:
            await loop.stop()
            async with self._update_lock:
                pass  # an update may outlive a cancelled pause
            loop.raise_error()
            loop.begin_collecting()
            if not generating:
                await loop.generation.interrupt()  # a cancelled `update_weights` may have left samples in flight
                loop.start_step(self._update_seconds)
            with UserCode():
                yield loop
        except BaseException:
            # A failure of the engine here must not replace the error that ended the block.
            with suppress(EngineError):
                await loop.generation.interrupt()
            raise

    async def _advance(self, or_reward: bool) -> None:
        """Fill the engine and wait for the next result."""
        loop, size = self._loop, self.params.rollout_batch_size
        loop.fill()
        if not loop.stalled:
            await loop.poll(or_reward)
        # A loop that stalls below its target has found no prompt; at its target, the staleness bound admits no group.
        elif len(self.buffer) < loop.target:
            raise ValueError(f"the prompts ran out: {len(self.state.ready)} complete groups where a step needs {size}")
        else:
            raise StalenessError(
                f"update the weights before the next batch: the engine has policy {self.engine_version}, the trainer "
                f"is at policy {self.trainer_version}, and max_staleness = {self.params.max_staleness} allows no more "
                "groups"
            )

    def _select(self) -> list[Group] | None:
        params, ready, version = self.params, self.state.ready.values(), self._loop.next_train_version
        size, bound = params.rollout_batch_size, params.max_staleness
        chosen = select(self.buffer, ready, version, size, bound, params.first_come, params.admission_window)
        self._loop.delayed |= chosen is None and len(ready) >= size
        return chosen

    def _hand_over(self, chosen: list[Group], generate_on: bool) -> RolloutBatch:
        loop = self._loop
        # First: the intervals of samples in flight end here, in this batch, from which the length model learns.
        carried = loop.generation.in_flight.start_step(loop.stats.now) if generate_on else []
        chosen_ids = {group.id for group in chosen}
        rest = [group for group in self.buffer if group.id not in chosen_ids]
        loop.stats.batch.tokens_behind_stops = self._shared.take_behind_stops()
        batch = loop.stats.close(loop.next_train_version, chosen, rest)
        bound = self.params.max_staleness
        assert bound is None or batch.staleness.max() <= bound, "the staleness bound is broken"
        self._history.apply(Trained([group.id for group in chosen], batch))
        if self.journal is not None:
            self.journal.flush()  # no await from here on: a cancelled call could otherwise lose the batch
        if generate_on:
            loop.continue_in_background(carried)
        return batch

    def _generate_after_replay(self) -> None:
        """Generate during the training on a replayed batch, unless the journal continues with its weight update."""
        match self._replay():
            case None:
                self._loop.start_step()
                self._loop.start()
            case Trained() | Updated():
                self._history.unread()

    async def update_weights(self, weights: Any = None, version: int | None = None) -> None:
        """Hand new weights to the engine. Generation is interrupted for the update, and continues afterwards.

        Args:
            weights: in the form that the engine documents.
            version: policy version of the weights. The default is the next version. The present `engine_version` hands
                the same policy over again: after a restart, or to an engine that lost its weights.

        Raises:
            StalenessError: a group in the buffer could no longer be trained on within the bound; take a batch first.
            ValueError: `version` is neither the present version nor the next.
        """
        async with self._update_lock:
            if self._paused:
                await self._update(weights, version)
                return
        async with self.pause(), self._update_lock:
            await self._update(weights, version)

    async def _update(self, weights: Any, version: int | None) -> None:
        if version not in (None, self.engine_version, self.engine_version + 1):
            raise ValueError(f"policy version {version} cannot follow {self.engine_version}")
        if version == self.engine_version:
            await self.engine.update_weights(version, weights)
            return
        version = self.engine_version + 1
        match self._replay():
            case Updated() as replayed:
                await self._update_engine(version, weights)
                self._history.replay_event(replayed)
                return
            case Trained() as other:
                raise self._history.out_of_order(other)
        # The selection of a batch has checked the bound for the update after it; a further update needs its own check.
        if version > self.trainer_version:
            otherwise = "take a batch between two weight updates: not all groups can be trained on"
            self.state.check_bound(version, otherwise)
        if self.params.redraft:
            await self._loop.scoring.close()  # responses that become drafts are scored no further
        await self._update_engine(version, weights)
        self._history.apply(Updated(version))

    async def _update_engine(self, version: int, weights: Any) -> None:
        began = asyncio.get_running_loop().time()
        await self.engine.update_weights(version, weights)
        self._update_seconds = asyncio.get_running_loop().time() - began

    def count_update(self, seconds: float) -> None:
        """Set the duration of the latest weight update in forecasts of admission, if more belongs to it than the call
        of the engine, such as the exchange of devices between engine and trainer."""
        self._update_seconds = seconds

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Interrupt generation for the block; nothing runs in the engine inside it. Generation continues afterwards if
        it ran before. Inside, `update_weights` and then `state_dict` may be called."""
        async with self._weights_lock:
            loop, version = self._loop, self.engine_version
            batch, generating = loop.stats.batch, loop.running
            interrupted_at = loop.stats.now if generating else None
            await loop.pause()
            self._paused = True
            try:
                yield
            finally:
                try:
                    async with self._update_lock:
                        pass  # an update that another task began inside may outlive the block
                finally:
                    self._paused = False
            # Not in `finally`: after a failed block, `next_batch` starts generation again.
            if generating:
                if self.engine_version > version:
                    batch.update_seconds, batch.interrupted_at = self._update_seconds, interrupted_at
                    batch.resumed_at = loop.stats.now
                loop.start()

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples_per_prompt: int = 1, sampling: SamplingParams | None = None
    ) -> list[Group]:
        """Return complete, unrewarded groups for `prompts`, apart from the buffer. The same prompts get the same seeds
        each time. With `overlap`, rollouts continue during an evaluation; `update_weights` waits until it has ended.

        Raises:
            EngineError: the engine failed or answered no request for `outage_limit` seconds, or a sample failed more
                often than `max_retries` while the engine worked.
        """
        async with self._weights_lock:
            # The evaluation closes its environments at its end; those of the rollouts stay open.
            own_episodes = None if self.episodes is None else self.episodes.apart()
            self._shared.check(sampling or self.sampling)
            return await evaluate(
                self._shared,
                prompts,
                n_samples_per_prompt,
                sampling or self.sampling,
                self.seed,
                self.engine_version,
                self.faults,
                own_episodes,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything a restart needs, as JSON types. Call it between batches; with `overlap`, inside `pause`."""
        assert not self.in_flight, "samples are in flight: their tokens are not all here yet"
        return {
            "seed": self.seed,
            "state": self.state.state_dict(),
            "prompts": self._source.position,
            "journal": None if self.journal is None else self.journal.mark(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups, tokens and data position of `state_dict`. Update the engine's weights next, to the same
        version: `update_weights(weights, version=scheduler.engine_version)`."""
        self._source.seed = state["seed"]
        self.state.load_state_dict(state["state"])
        self._source.go_to(state["prompts"])
        if self.journal is not None:
            self.journal.seek(state["journal"])

    def _replay(self) -> Trained | Updated | None:
        event = self._history.replay()
        self._source.go_to(self._history.prompts)
        return event

    def _replay_batch(self) -> RolloutBatch | None:
        """Replay the journal up to its next batch and return that batch; None at the journal's end."""
        match self._replay():
            case Trained() as replayed:
                self.state.admission.plan(self.params.rollout_batch_size)  # plans from the replayed observations
                self._history.replay_event(replayed)
                return replayed.step
            case Updated() as other:
                raise self._history.out_of_order(other)
        return None


def _new_state(
    engine: Engine, params: RolloutParams, max_tokens: int, filtered: bool, scored: bool, sample_type: type[Sample]
) -> RolloutState:
    lengths = LengthModel.for_batch(max_tokens, params.rollout_batch_size * params.n_samples_per_prompt)
    admission = params.over_sampling_batch_size
    if admission == "auto":
        admission = AutoAdmission(engine, lengths, params.n_samples_per_prompt, params.max_staleness)
    elif isinstance(admission, int):
        admission = FixedAdmission(admission)
    if params.ramp_steps:
        admission = RampedAdmission(admission, params.ramp_steps)
    return RolloutState(params, lengths, admission, filtered, scored, sample_type)
