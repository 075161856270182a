"""How many groups to have under way: what every admission policy is asked.

Invariant: admission only ever decides how many groups are begun. It never drops, restarts or truncates one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from april.rollout.batch import Plan, RolloutBatch


class Admission(Protocol):
    def plan(self, batch_size: int) -> Plan:
        """What to aim at in the step that begins."""
        ...

    def observe(self, step: RolloutBatch) -> None:
        """Learn from a step that is over."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def largest_target(batch_size: int, max_staleness: int | None) -> int | None:
    """The most groups under way for which the staleness bound can be kept; None if there is no bound.

    With N groups leaving a step, N' groups under way leave N' - N that must all be trained on within S more steps.
    """
    return None if max_staleness is None else batch_size * (max_staleness + 1)
