"""The paper's over-provisioning: a fixed number of groups in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from april.rollout.batch import Plan, RolloutBatch


@dataclass(frozen=True, slots=True)
class FixedAdmission:
    """Keeps N' = `over_sampling_batch_size` groups in flight."""

    over_sampling_batch_size: int

    def plan(self, batch_size: int) -> Plan:
        return Plan(max(self.over_sampling_batch_size, batch_size))

    def observe(self, step: RolloutBatch) -> None:
        """Do nothing: the number is fixed."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""
