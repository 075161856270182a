"""The paper's over-provisioning: as many groups under way as were set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from april.rollout.admission.admission import largest_target
from april.rollout.step import Plan, Step


@dataclass(frozen=True, slots=True)
class FixedAdmission:
    """The paper's over-provisioning: N' groups under way, whatever happens."""

    over_sampling_batch_size: int

    @classmethod
    def within(
        cls,
        batch_size: int,
        over_sampling: int | None,
        max_staleness: int | None,
        names: tuple[str, str, str] = ("rollout_batch_size", "over_sampling_batch_size", "max_staleness"),
    ) -> FixedAdmission:
        """N' groups under way, N if None.

        Args:
            names: of the three before, where the user sets them.

        Raises:
            ValueError: fewer than a step needs, or more than the staleness bound allows.
        """
        over_sampling = batch_size if over_sampling is None else over_sampling
        size, target, bound = names
        if batch_size < 1:
            raise ValueError(f"{size} = {batch_size}: a step needs at least one group")
        if over_sampling < batch_size:
            raise ValueError(
                f"{target} = {over_sampling} is less than {size} = {batch_size}: raise it to {batch_size}, for "
                "synchronous rollouts, or more"
            )
        largest = largest_target(batch_size, max_staleness)
        if largest is not None and over_sampling > largest:
            raise ValueError(
                f"{target} = {over_sampling} cannot keep {bound} = {max_staleness}: with {size} = {batch_size} at most "
                f"{largest} groups may be under way; lower the first, or raise the second to "
                f"{-(-over_sampling // batch_size) - 1}"
            )
        return cls(over_sampling)

    def plan(self, batch_size: int) -> Plan:
        return Plan(max(self.over_sampling_batch_size, batch_size))

    def observe(self, step: Step) -> None:
        """Nothing changes its mind."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""
