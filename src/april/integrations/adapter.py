"""The scheduler as a framework's training loop uses it: prompts in, complete groups out.

Invariants:
- a batch is exactly N complete groups, each with its own prompt and metadata; as a rule some of them were started for
  earlier batches, and some of the prompts requested for this batch come back in later ones;
- every requested prompt is started once, in the order requested; extra prompts are drawn only when no requested prompt
  is left, so that N' groups can be in flight although N are requested;
- between calls nothing runs in the engine, unless `overlap` is set: unfinished samples wait in the scheduler's buffer,
  which is part of `state_dict`;
- evaluation neither reads nor changes the buffer;
- a policy version ends with the batch that is trained on: weights that arrive after a batch are the next version,
  weights that arrive before one (at the start, after a restart, for an evaluation) are those of the present version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from april.integrations.prompts import RequestedPrompts
from april.rollout.batch import RolloutBatch
from april.rollout.engine import Engine
from april.rollout.params import RolloutParams
from april.rollout.rewards import GroupRewardFunction, RewardFunction
from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample


async def unscored(prompt: Prompt, sample: Sample) -> float:
    """Return reward 0, for frameworks that compute their rewards afterwards."""
    return 0.0


class RolloutAdapter:
    """A `RolloutScheduler` for a framework. Concurrent calls wait for one another; from a synchronous loop, run them on
    an `EventLoop`.

    Args:
        engine: inference engine. The caller closes it.
        params: number of groups in flight, and N = `rollout_batch_size`, the number of groups of a batch.
        extra: prompts beyond those that the framework requests. They raise the groups in flight from N to N': the first
            call draws N' - N of them, later calls replace groups that a filter rejected. If nothing is requested, all
            prompts come from here. The position of `ResumablePrompts` is part of `state_dict`.
        reward: scores samples while others are generated. By default every reward is 0 and the framework scores.
        settings: further arguments of `RolloutScheduler`: `sampling`, `faults`, `dynamic_filter`, `seed`, …
    """

    def __init__(
        self,
        engine: Engine,
        params: RolloutParams,
        *,
        extra: Iterable[Prompt] = (),
        reward: RewardFunction | GroupRewardFunction = unscored,
        **settings: Any,
    ) -> None:
        self.prompts = RequestedPrompts(extra)
        self.scheduler = RolloutScheduler(engine, self.prompts, reward, params, **settings)
        self._lock = asyncio.Lock()
        self._batch_taken = False
        """A batch was taken under the present policy version."""

    @property
    def version(self) -> int:
        """Policy version of the engine's weights."""
        return self.scheduler.engine_version

    async def rollout(self, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Request `prompts` and return the next batch.

        After an error or a cancellation the prompts stay requested and no sampled token is lost: call `next_batch`.

        Raises:
            ValueError: not exactly N prompts, or a prompt does not fit the engine.
            EngineError, RewardError: see `RolloutScheduler.next_batch`.
        """
        expected = self.scheduler.params.rollout_batch_size
        if len(prompts) != expected:
            raise ValueError(f"{len(prompts)} prompts were requested where rollout_batch_size = {expected}")
        async with self._lock:
            self.prompts.request(prompts)
            return await self._next_batch()

    async def next_batch(self) -> RolloutBatch:
        """Return the next batch without requesting prompts."""
        async with self._lock:
            return await self._next_batch()

    async def _next_batch(self) -> RolloutBatch:
        batch = await self.scheduler.next_batch()
        self._batch_taken = True
        return batch

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples_per_prompt: int = 1, sampling: SamplingParams | None = None
    ) -> list[Group]:
        """Return complete, unrewarded groups of exactly these prompts, in order, without using the buffer."""
        async with self._lock:
            return await self.scheduler.evaluate(prompts, n_samples_per_prompt, sampling)

    async def update_weights(self, weights: Any = None, version: int | None = None) -> None:
        """Hand new weights to the engine.

        Args:
            version: policy version of the weights; by default the next one. The present version is for an engine that
                lost its weights, or was restarted.

        Raises:
            StalenessError: twice without a batch between, a group could no longer be trained on within the bound.
        """
        async with self._lock:
            await self._update(weights, version)

    async def follow_weights(self, weights: Any = None) -> None:
        """Hand weights to the engine that the framework does not number: a new policy version after a batch, else the
        present version.

        Raises:
            StalenessError: see `update_weights`.
        """
        async with self._lock:
            await self._update(weights, None if self._batch_taken else self.version)

    async def advance_to(self, version: int) -> None:
        """Raise the policy version to the framework's, if it is lower; the engine has the weights already.

        Raises:
            StalenessError: see `update_weights`.
        """
        async with self._lock:
            while self.version < version:
                await self._update(None, None)

    async def _update(self, weights: Any, version: int | None) -> None:
        before = self.version
        await self.scheduler.update_weights(weights, version)
        if self.version != before:
            self._batch_taken = False

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer and the position of the prompts as JSON types. Call it between calls."""
        return {"scheduler": self.scheduler.state_dict(), "batch_taken": self._batch_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. The engine needs its weights next."""
        self.scheduler.load_state_dict(state["scheduler"])
        self._batch_taken = state["batch_taken"]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop generating. The buffer can still be saved."""
        await self.scheduler.__aexit__()
