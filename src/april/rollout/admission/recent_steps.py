"""Running averages over the last steps, for decisions about N'.

Invariant: a step of zero duration changes no rate and no duration.
"""

from __future__ import annotations

from dataclasses import dataclass

from april.rollout.batch import Plan, RolloutBatch

MEASURED_STEPS = 4
"""Steps with the same N' before its measured throughput is compared with the forecast."""
CONFIRMED = 0.8
"""Share of the forecast throughput that must be measured. Forecasts are off by 5 to 19 % with most groups in flight
(`choice.py`)."""


@dataclass(slots=True)
class RecentSteps:
    """Means over the last few steps; JSON types, so that `asdict` saves them."""

    steps: int = 0
    prompt_tokens: float = 0.0
    accepted: float = 1.0
    """Share of complete groups that were not rejected."""
    step_seconds: float = 0.0
    interrupt_seconds: float = 0.0
    update_seconds: float = 0.0
    training_seconds: float = 0.0
    """Seconds of training that overlap with generation; 0 without overlap."""
    away_seconds: float = 0.0
    """Seconds of an episode's environment per token of the policy; 0 without an environment."""
    running: float = 0.0
    """Mean number of samples that decode."""
    resumed_prefill: float = 0.0
    """Share of a step's time in which resumed samples were prefilled, by the estimated costs."""
    budget: float = 0.0
    """Seconds left for learning and planning."""
    synchronous: int = 0
    """Consecutive steps with N' = N."""
    probing: bool = False
    """The next step tries a larger N' once."""
    probes: int = 0
    """Number of such trials since a larger N' was planned."""

    target: int = 0
    """N' of the latest step."""
    target_steps: int = 0
    """Steps in a row with this N', since the last comparison with a forecast."""
    target_tokens: int = 0
    """Tokens consumed in these steps."""
    target_seconds: float = 0.0
    """Seconds that these steps took."""
    proven: int = 0
    """Largest N' for which the measured throughput was close to its forecast; 0 for none."""

    def add(self, step: RolloutBatch, prompt_tokens: float, slots: int) -> None:
        """Learn from a finished step on `slots` slots."""
        if step.target != self.target:
            self.target, self.target_steps, self.target_tokens, self.target_seconds = step.target, 0, 0, 0.0
        self.target_steps += 1
        self.target_tokens += step.consumed_tokens
        self.target_seconds += step.seconds
        self.prompt_tokens = self._mean(self.prompt_tokens, prompt_tokens)
        self.accepted = self._mean(self.accepted, len(step.groups) / (len(step.groups) + len(step.rejections)))
        self.step_seconds = self._mean(self.step_seconds, step.seconds)
        self.away_seconds = self._mean(self.away_seconds, step.environment_seconds / max(step.consumed_tokens, 1))
        if step.seconds > 0:
            self.running = self._mean(self.running, slots * step.occupancy)
        if step.update_seconds is not None:
            self.update_seconds = self._mean(self.update_seconds, step.update_seconds)
        self.training_seconds = self._mean(self.training_seconds, step.training_seconds)
        if step.interrupted_at is not None:
            # Without overlap, the step ends with the interrupt and the wait for rewards after it.
            over = step.seconds - step.reward_wait_seconds
            if step.resumed_at is not None:  # after a weight update during the step
                over = step.resumed_at - (step.update_seconds or 0.0)
            self.interrupt_seconds = self._mean(self.interrupt_seconds, max(over - step.interrupted_at, 0.0))
        if step.target == len(step.groups):
            self.synchronous += 1
        elif not self.probing:
            self.synchronous = self.probes = 0
        self.probing = False
        self.steps += 1

    def compare(self, plan: Plan) -> None:
        """Compare the throughput measured under `plan` with its forecast, every few steps."""
        if plan.target != self.target or self.target_steps < MEASURED_STEPS or plan.consumed_tokens_per_second is None:
            return
        if self.target_tokens >= CONFIRMED * plan.consumed_tokens_per_second * self.target_seconds:
            self.proven = max(self.proven, self.target)
        self.target_steps, self.target_tokens, self.target_seconds = 0, 0, 0.0

    def add_resumed_prefill(self, prefill_seconds: float, step_seconds: float) -> None:
        """Learn the time in which a step's resumed samples were prefilled."""
        if step_seconds > 0:
            share = min(prefill_seconds / step_seconds, 1.0)
            self.resumed_prefill += (share - self.resumed_prefill) / (4 if self.steps > 1 else 1)

    def probe(self) -> None:
        """Let the next step try more groups."""
        self.synchronous, self.probing, self.probes = 0, True, self.probes + 1

    def _mean(self, before: float, now: float) -> float:
        """Return the mean with a new value. The first value that is not zero is the first mean."""
        return before + (now - before) / (4 if before and self.steps else 1)
