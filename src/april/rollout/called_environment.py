"""An environment that lives somewhere else, as one that is called here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from april.rollout.environment import EnvStep, Observation, Turn


class CalledEnvironment(ABC):
    """Carries the calls of an environment to where it lives."""

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> Observation:
        observation: Observation = await self._call("reset", prompt, seed)
        return observation

    async def step(self, turn: Turn) -> EnvStep:
        step: EnvStep = await self._call("step", turn)
        return step

    async def state(self) -> Any:
        return await self._call("state")

    async def restore(self, state: Any) -> None:
        await self._call("restore", state)

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _call(self, method: str, *args: Any) -> Any:
        """What the environment's method of that name returns, or raises."""
