"""The paper's over-provisioning: as many groups under way as were set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from april.rollout.batch import Plan, RolloutBatch


@dataclass(frozen=True, slots=True)
class FixedAdmission:
    """The paper's over-provisioning: N' groups under way, whatever happens."""

    over_sampling_batch_size: int

    def plan(self, batch_size: int) -> Plan:
        return Plan(max(self.over_sampling_batch_size, batch_size))

    def observe(self, step: RolloutBatch) -> None:
        """Nothing changes its mind."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""
