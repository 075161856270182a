"""The tool of this example, and the same as an environment that takes its time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Literal

from april import EnvStep, Turn
from april.environments.tools import ToolEnvironment


def subtract(a: int, b: int) -> int:
    """Subtract a number from another.

    Args:
        a: The number that is subtracted from.
        b: The number that is subtracted.
    """
    return a - b


class SlowSubtraction(ToolEnvironment):
    """`subtract`, whose answers come late.

    Args:
        latency: seconds that an answer takes on average.
        tail: "none": every answer takes that long; "heavy": by a Pareto distribution with the exponent 1.5, cut off at
            fifty times the average.
    """

    def __init__(self, latency: float = 0.0, tail: Literal["none", "heavy"] = "none") -> None:
        self.latency, self.tail, self.seed = latency, tail, 0
        super().__init__({"subtract": subtract})

    def reset(self, prompt: Mapping[str, Any], seed: int) -> str:
        self.seed = seed
        return ""

    async def step(self, turn: Turn) -> EnvStep:  # type: ignore[override]
        await asyncio.sleep(self.seconds(turn.index))
        return await self._step_async(turn)

    def seconds(self, turn: int) -> float:
        """What the answer to turn `turn` takes: the same each time."""
        if self.tail == "none":
            return self.latency
        return self.latency * min(random.Random(f"{self.seed} {turn}").paretovariate(1.5) / 3, 50)
