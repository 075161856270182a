"""Admission that starts synchronously and increases N' to the target of another admission policy.

When nothing is in flight yet, the groups that complete first are those with short responses, and a first step with
N' > N would train on them alone. A ramp starts with N' = N, which trains on every started group, and increases N'.

Invariant: N <= N' <= the target of the other admission policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from april.rollout.admission.admission import Admission
from april.rollout.batch import Plan, RolloutBatch


@dataclass(slots=True)
class RampedAdmission:
    """Increases N' from N in the first step to the target of `goal` after `ramp_steps` steps, in equal increments.

    Args:
        ramp_steps: steps with a smaller N' than the target; with 1 only the first step is synchronous.
    """

    goal: Admission
    ramp_steps: int
    steps: int = 0
    """Finished steps."""

    def plan(self, batch_size: int) -> Plan:
        plan = self.goal.plan(batch_size)
        if self.steps >= self.ramp_steps:
            return plan
        target = batch_size + (plan.target - batch_size) * self.steps // self.ramp_steps
        return replace(plan, target=target, reason=f"ramp to {plan.target} ({plan.reason})")

    def observe(self, step: RolloutBatch) -> None:
        self.goal.observe(step)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `goal`, with the ramp's own only until its end, so that a run can resume with or without
        a ramp."""
        own = {"ramp": self.steps} if self.steps < self.ramp_steps else {}
        return {**self.goal.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state.get("ramp", self.ramp_steps)
        self.goal.load_state_dict({name: value for name, value in state.items() if name != "ramp"})
