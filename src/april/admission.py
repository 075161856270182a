"""How many groups to have under way.

Invariant: admission only ever decides how many groups are begun. It never drops, restarts or truncates one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Admission(Protocol):
    def target(self, batch_size: int) -> int:
        """Groups to have under way in this step, complete ones that wait included; at least `batch_size`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedAdmission:
    """The paper's over-provisioning: N' groups under way, whatever happens."""

    over_sampling_batch_size: int

    def target(self, batch_size: int) -> int:
        return max(self.over_sampling_batch_size, batch_size)


def largest_target(batch_size: int, max_staleness: int | None) -> int | None:
    """The most groups under way for which the staleness bound can be kept; None if there is no bound.

    With N groups leaving a step, N' groups under way leave N' - N that must all be trained on within S more steps.
    """
    return None if max_staleness is None else batch_size * (max_staleness + 1)
