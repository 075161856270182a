"""Admission policies: how many groups are in flight.

Invariant: admission only decides how many groups are started. It never drops, restarts or truncates a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from april.rollout.batch import Plan, RolloutBatch


class Admission(Protocol):
    def plan(self, batch_size: int) -> Plan:
        """Return the plan for the step that begins."""
        ...

    def observe(self, step: RolloutBatch) -> None:
        """Learn from a finished step."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def largest_target(batch_size: int, max_staleness: int | None) -> int | None:
    """Return the largest N' for which the staleness bound can be kept; None if there is no bound.

    After a step has consumed N of N' groups in flight, N' - N groups remain, which must be consumed in S more steps.
    """
    return None if max_staleness is None else batch_size * (max_staleness + 1)
