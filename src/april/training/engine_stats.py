"""Metrics of each step about engines and weight transfers."""

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
    """Counts engines that are ready, used and lost, if a run has several."""

    def __init__(self, engine: Engine) -> None:
        self.members: Sequence[Member | JobMember] = (
            engine.members if isinstance(engine, EnginePool | JobEngine) else []
        )
        self._losses = 0
        self._given = [0] * len(self.members)

    def metrics(self) -> dict[str, Any]:
        """Return metrics since the last call; none for a single engine.

        - `engines`, `engines_ready`, `nodes`: current numbers; `nodes` counts nodes with a ready engine;
        - `engines_used`: engines that received samples since the last call;
        - `engines_lost`: losses of engines since the last call.
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
    """Return the bytes transferred per engine, or per node if its engines share a copy; None without a transfer, or if
    its size is unknown."""
    if isinstance(weights, str | Path):
        return sum(file.stat().st_size for file in Path(weights).glob("*.safetensors"))
    size = getattr(weights, "size", None)
    return size if isinstance(size, int) else None
