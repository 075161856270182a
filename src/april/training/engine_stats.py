"""What a run says of the engines behind it and of the weights that they are handed, as metrics of each step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from april.engines.job import JobEngine, JobMember
from april.engines.member import Member
from april.engines.pool import EnginePool
from april.rollout.engine import Engine


class EngineStats:
    """The engines of a run, if they are several."""

    def __init__(self, engine: Engine) -> None:
        self.members: Sequence[Member | JobMember] = (
            engine.members if isinstance(engine, EnginePool | JobEngine) else []
        )
        self._losses = 0
        self._given = [0] * len(self.members)

    def metrics(self) -> dict[str, Any]:
        """Nothing of an engine alone.

        - `engines`, `engines_ready`, `nodes`: as they are now; nodes are counted where a ready engine works;
        - `engines_used`: those that were given samples since this was asked last;
        - `engines_lost`: how often one was lost since then.
        """
        if not self.members:
            return {}
        ready = [member for member in self.members if member.ready]
        before, self._losses = self._losses, sum(member.losses for member in self.members)
        given, self._given = self._given, [member.given for member in self.members]
        joined = [0] * (len(self._given) - len(given))
        return {
            "engines": len(self.members),
            "engines_ready": len(ready),
            "engines_used": sum(map(operator.lt, given + joined, self._given)),
            "nodes": len({member.place for member in ready}),
            "engines_lost": self._losses - before,
        }


def bytes_of(weights: Any) -> int | None:
    """What is handed over for each engine, or for each node where its engines share it; None if nothing moves, or what
    moves does not say."""
    if isinstance(weights, str | Path):
        return sum(file.stat().st_size for file in Path(weights).glob("*.safetensors"))
    size = getattr(weights, "size", None)
    return size if isinstance(size, int) else None
