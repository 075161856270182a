"""Admission that begins synchronous and ends at what another admission wants.

When nothing is under way yet, the groups that are complete first are the quick ones, and a step with N' > N is trained
on nothing else. A ramp begins with N' = N, which trains on whatever was begun, and lets N' grow from there.

Invariant: N <= N' <= what the other admission wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from april.rollout.admission.admission import Admission
from april.rollout.batch import Plan, RolloutBatch


@dataclass(slots=True)
class RampedAdmission:
    """N' grows from N in the first step to what `goal` wants after `ramp_steps` steps, by the same share in each.

    Args:
        ramp_steps: steps with less than the goal; with 1 only the first step is synchronous.
    """

    goal: Admission
    ramp_steps: int
    steps: int = 0
    """Steps that are over."""

    def plan(self, batch_size: int) -> Plan:
        wanted = self.goal.plan(batch_size)
        if self.steps >= self.ramp_steps:
            return wanted
        target = batch_size + (wanted.target - batch_size) * self.steps // self.ramp_steps
        return replace(wanted, target=target, reason=f"on the way to {wanted.target} ({wanted.reason})")

    def observe(self, step: RolloutBatch) -> None:
        self.goal.observe(step)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The goal's own once the ramp is over, so that a run may go on without one, or with one that it never had."""
        climbed = {"ramp": self.steps} if self.steps < self.ramp_steps else {}
        return {**self.goal.state_dict(), **climbed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state.get("ramp", self.ramp_steps)
        self.goal.load_state_dict({name: value for name, value in state.items() if name != "ramp"})
