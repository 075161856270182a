"""Partial rollouts for a training loop that asks for N prompts and wants N complete groups back.

Invariants:
- a call returns exactly N complete groups, each with its own prompt and metadata; as a rule some of them were begun in
  earlier calls and some of the prompts asked for now come back in later ones;
- every prompt asked for is begun once, in the order asked; extra prompts are drawn only when none of those is left, so
  that N' groups can be under way although N are asked for;
- between calls nothing runs in the engine: what is unfinished waits here, and is part of `state_dict`;
- evaluation neither sees nor changes the buffer.
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
from april.rollout.trajectory import Group, Prompt, Sample


async def unscored(prompt: Prompt, sample: Sample) -> float:
    """The reward where the framework computes its own afterwards."""
    return 0.0


class RolloutAdapter:
    """N prompts in, N complete groups out. Calls wait for one another; from a synchronous loop, use an `EventLoop`.

    Args:
        engine: whatever generates. It belongs to the caller, who closes it.
        params: how many groups are under way; `rollout_batch_size` prompts are asked for in a call, and as many groups
            returned (N).
        extra: prompts that bring the groups under way from N to N' (the first call draws N' - N, later ones only what
            a filter turned away). Without them rollouts are synchronous. Saved with `state_dict` if it has one.
        reward: scores samples while others generate; by default every reward is 0 and the framework scores.
        settings: any other of `RolloutScheduler`: `sampling`, `faults`, `dynamic_filter`, `seed`, …
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
        self._turn = asyncio.Lock()

    @property
    def version(self) -> int:
        """The policy version that generates."""
        return self.scheduler.engine_version

    async def rollout(self, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Begin `prompts` and return the step of the N oldest complete groups.

        If it fails or is cancelled, the prompts stay asked for and nothing sampled is lost: `resume` goes on.

        Raises:
            ValueError: not exactly N prompts, or one that does not fit the engine.
            EngineError, RewardError: see `RolloutScheduler.next_batch`.
        """
        expected = self.scheduler.params.rollout_batch_size
        if len(prompts) != expected:
            raise ValueError(f"{len(prompts)} prompts were requested where rollout_batch_size = {expected}")
        async with self._turn:
            self.prompts.request(prompts)
            return await self.scheduler.next_batch()

    async def resume(self) -> RolloutBatch:
        """The step of a `rollout` that failed or was cancelled, asking for nothing new."""
        async with self._turn:
            return await self.scheduler.next_batch()

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples_per_prompt: int = 1, sampling: SamplingParams | None = None
    ) -> list[Group]:
        """Complete, unrewarded groups of exactly these prompts, in order, past the buffer."""
        async with self._turn:
            return await self.scheduler.evaluate(prompts, n_samples_per_prompt, sampling)

    async def update_weights(self, weights: Any = None) -> None:
        """The policy has changed: its version goes up by one, and the engine goes over to `weights`.

        Raises:
            StalenessError: twice without a rollout between, a group could no longer be trained on within the bound.
        """
        async with self._turn:
            await self.scheduler.update_weights(weights)

    async def load_weights(self, weights: Any = None) -> None:
        """Hand the current version's weights to the engine: after a restart, or when it has others."""
        async with self._turn:
            await self.scheduler.update_weights(weights, version=self.scheduler.engine_version)

    def state_dict(self) -> dict[str, Any]:
        """Everything that waits, as JSON types, for the framework's checkpoint. Call it between calls."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. `load_weights` comes next."""
        self.scheduler.load_state_dict(state)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop what runs. The buffer can still be saved."""
        await self.scheduler.__aexit__()
