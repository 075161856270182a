"""Alarms: conditions of a run that need its user's attention although no step fails.

Each alarm is a pure function of the records of the latest steps, oldest first. It returns a message while its condition
holds, and None otherwise. A metric that is missing, null or not a number counts as not measured.

Invariant: a message is given once, and again only after the condition has ceased to hold in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from april.reporting.metrics import is_number

LEAST_ESS = 0.85
"""Smallest effective sample size of an update, as a mean over `STEPS`, that goes without a message."""
MOST_KL = 0.002
"""Largest KL to the behaviour policy in nats per token, as a mean over `STEPS`, that goes without a message."""
FORECAST_ERROR = 1.5
"""Largest ratio of expected to measured throughput, or the inverse, that goes without a message."""
STEPS = 3
FORECAST_STEPS = 8
"""Steps over which throughput is compared with its forecast, which is for the long run."""

Record = Mapping[str, Any]


def drift(records: Sequence[Record]) -> str | None:
    """The policy moves too far in an update for data as stale as it has.

    Both thresholds are from `benchmarks/accuracy/remedies.md`: of its runs with partial rollouts, those at three times
    the best learning rate were beyond both, and those at the best rate were not. The effective sample size alone would
    not do: a response's ratio is a product over its tokens, so long responses have small effective sample sizes at any
    learning rate.
    """
    ess, kl = _mean(records, "ess"), _mean(records, "kl_behaviour")
    if ess is None or kl is None or ess >= LEAST_ESS or kl <= MOST_KL:
        return None
    grad_norm = _mean(records, "grad_norm")
    norm = "" if grad_norm is None else f", the gradient norm {grad_norm:.2f}"
    return (
        f"the policy moves too far for data this stale: over {STEPS} steps the effective sample size is {ess:.2f} "
        f"(below {LEAST_ESS}), the KL to the behaviour policy {kl:.4f} nats per token (above {MOST_KL}){norm}; lower "
        "learning_rate, to a third for a start, or over_sampling_batch_size"
    )


def no_signal(records: Sequence[Record]) -> str | None:
    """No group has samples with different rewards, and no other loss term has a gradient."""
    without = [
        record.get("frac_reward_zero_std") == 1 and 0 in (record.get("reward_std"), record.get("grad_norm"))
        for record in records
    ]
    if not all(without):
        return None
    reward = _mean(records, "reward")
    at = "" if reward is None else f" (mean reward {reward:.3f})"
    return (
        f"nothing is learned: in {STEPS} steps the samples of each prompt had equal rewards{at}; check the reward "
        "function and the answers, choose problems that are neither always nor never solved, or raise "
        "n_samples_per_prompt"
    )


def failing_environments(records: Sequence[Record]) -> str | None:
    """At least as large a number of episodes failed in their environments as were trained on."""
    shares = _values(records, "episodes_failed_share")
    if shares is None or min(shares) < 1:
        return None
    return (
        f"environments fail in every episode: over {STEPS} steps {fmean(shares):.1f} failures for each episode that is "
        "trained on; faults.jsonl has the errors"
    )


def wrong_forecast(records: Sequence[Record]) -> str | None:
    """The throughput differs much from the forecast that N' was chosen by."""
    expected, tokens = _mean(records, "expected_consumed_tokens_per_second"), _values(records, "step_consumed_tokens")
    seconds = _values(records, "rollout_seconds")
    if not expected or tokens is None or seconds is None or not sum(seconds):
        return None
    # A ratio of sums, because a mean of rates would give short steps too much weight.
    measured = sum(tokens) / sum(seconds)
    if expected <= FORECAST_ERROR * measured and measured <= FORECAST_ERROR * expected:
        return None
    return (
        f"automatic N' expected {expected:,.0f} consumed tokens/s, but {measured:,.0f} were measured over "
        f"{FORECAST_STEPS} steps: its choice may be far from the best; compare with a fixed over_sampling_batch_size, "
        "such as twice rollout_batch_size"
    )


@dataclass(slots=True)
class _Alarm:
    condition: Callable[[Sequence[Record]], str | None]
    steps: int = STEPS
    raised: bool = False
    latest: deque[Record] = field(init=False)

    def __post_init__(self) -> None:
        self.latest = deque(maxlen=self.steps)

    def observe(self, record: Record) -> str | None:
        self.latest.append(record)
        message = self.condition(self.latest) if len(self.latest) == self.steps else None
        before, self.raised = self.raised, message is not None
        return None if before else message


class Alarms:
    """All alarms of a run, which observe its metrics as steps end."""

    def __init__(self) -> None:
        conditions = (drift, no_signal, failing_environments)
        self._alarms = [*map(_Alarm, conditions), _Alarm(wrong_forecast, FORECAST_STEPS)]

    def observe(self, record: Record) -> list[str]:
        """Return the messages that another step's metrics raise; empty if no alarm is newly raised."""
        return [message for alarm in self._alarms if (message := alarm.observe(record)) is not None]


def _values(records: Sequence[Record], name: str) -> list[float] | None:
    """Return the metric of each record; None unless all records have it."""
    values = [float(record[name]) for record in records if is_number(record.get(name))]
    return values if len(values) == len(records) else None


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = _values(records, name)
    return None if values is None else fmean(values)
