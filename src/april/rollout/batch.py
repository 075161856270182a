"""The batch of one rollout step, with the statistics of its collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april.rollout.buffer import Rejection
from april.rollout.request_interval import RequestInterval
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.segment import ENVIRONMENT
from april.secrets import redact


def rate(amount: float, seconds: float) -> float:
    """`amount` per second; 0 if it took no time."""
    return amount / seconds if seconds > 0 else 0.0


class Alternative(NamedTuple):
    """Forecast for one choice of N' in the long run."""

    target: int
    consumed_tokens_per_second: float
    staleness: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Decision of admission about a step, with its forecast.

    Args:
        target: groups to have in the buffer (N'), including complete groups; at least `rollout_batch_size`.
        reason: a sentence for the report.
        consumed_tokens_per_second: forecast for the long run; None without a forecast.
        staleness: forecast of the mean staleness, in versions.
        alternatives: each N' that was considered, smallest first.
        resumed_prefill_share: estimated share of the engine's time, in the steps before the plan was made, in which
            resumed samples were prefilled; None without an estimate.
    """

    target: int
    reason: str = "as set"
    consumed_tokens_per_second: float | None = None
    staleness: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    resumed_prefill_share: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "alternatives", tuple(Alternative(*one) for one in self.alternatives))


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed reward function, filter, engine request or environment, with its prompt.

    `error` contains no secret: it is logged, and stored in the journal.
    """

    kind: Literal[
        "reward",
        "reward timeout",
        "filter",
        "engine",
        "environment",
        "environment timeout",
        "environment lost",
        "environment restart",
    ]
    sample_id: str
    prompt_id: str
    error: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", redact(self.error))


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A group that was left out because its requests, or its reward, kept failing.

    `error` is the last failure. It contains no secret: it is logged, and stored in the journal.
    """

    group_id: int
    prompt_id: str
    reason: Rejection
    error: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", redact(self.error))


@dataclass(slots=True)
class RolloutBatch:
    """Exactly N complete, rewarded groups, and the statistics of their collection.

    `seconds` is the duration of `next_batch` by the event loop's clock; with `overlap`, the time since the previous
    batch was returned. `reward_wait_seconds` is the part of it in which only rewards were awaited, and
    `environment_wait_seconds` the part in which only environments were. `occupancy` is the time-weighted share of the
    engine's slots that were decoding.
    """

    version: int
    """Version of the policy that is trained on the batch."""
    plan: Plan
    """Plan of admission for this step."""
    groups: list[Group] = field(default_factory=list)
    request_intervals: list[RequestInterval] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rejections: list[tuple[int, Rejection]] = field(default_factory=list)
    quarantined: list[Quarantine] = field(default_factory=list)
    """The rejected groups that were quarantined because of a fault."""
    seconds: float = 0.0
    reward_wait_seconds: float = 0.0
    environment_wait_seconds: float = 0.0
    update_seconds: float | None = None
    """Duration of the weight update before or within the step; None if this process has made none."""
    interrupted_at: float | None = None
    resumed_at: float | None = None
    """Time at which generation resumed after a weight update within the step; None if there was none."""
    sampled_tokens: int = 0
    tokens_behind_stops: int = 0
    """Tokens that the engine drew behind stop strings, evaluations included; no sample has them."""
    occupancy: float = 0.0
    idle_slots: float = 0.0
    """Time-weighted share of the engine's slots for which no sample was in flight. The other slots that do not decode
    belong to samples that wait for KV cache or for prefill."""
    surplus_groups: int = 0
    """Complete groups left for the next step."""
    buffered_groups: int = 0
    """Groups in the buffer after the step, including surplus groups."""
    buffered_tokens: int = 0

    @property
    def target(self) -> int:
        """Groups that admission wanted in the buffer (N')."""
        return self.plan.target

    @property
    def consumed_tokens(self) -> int:
        """Tokens of the batch that policies sampled."""
        return sum(group.tokens for group in self.groups)

    @property
    def environment_tokens(self) -> int:
        """Tokens of the batch that environments inserted."""
        return sum(group.environment_tokens for group in self.groups)

    @property
    def environment_seconds(self) -> float:
        """Seconds that environments took for the episodes of the batch, over all turns."""
        samples = (sample for group in self.groups for sample in group.samples)
        return sum(one.seconds for sample in samples for one in sample.transitions)

    @property
    def reward_metrics(self) -> dict[str, float]:
        """Mean of each number in the samples' `reward_info`, as `reward/<name>`, over the samples that have it."""
        numbers: dict[str, list[float]] = {}
        for sample in (sample for group in self.groups for sample in group.samples):
            for name, value in sample.reward_info.items():
                if isinstance(value, (int, float)):
                    numbers.setdefault(f"reward/{name}", []).append(float(value))
        return {name: sum(values) / len(values) for name, values in sorted(numbers.items())}

    @property
    def training_seconds(self) -> float:
        """Seconds that the trainer trained during generation: from the previous batch to the weight update; 0 without
        overlap."""
        return 0.0 if self.resumed_at is None or self.interrupted_at is None else self.interrupted_at

    @property
    def requests_by_update(self) -> list[list[RequestInterval]]:
        """The request intervals before the weight update within the step and after it; one list without an update."""
        middle = self.resumed_at
        if middle is None:
            return [self.request_intervals]
        return [
            [s for s in self.request_intervals if s.start < middle],
            [s for s in self.request_intervals if s.start >= middle],
        ]

    @property
    def resumed_samples(self) -> int:
        """Samples that were resumed from tokens of earlier steps."""
        # Reversed, so that the first interval of each sample stays: later ones follow a retry or a turn of this step.
        first = {span.sample_id: span for span in reversed(self.request_intervals)}
        return sum(span.before > 0 and not span.running for span in first.values())

    @property
    def interrupted_samples(self) -> int:
        """Samples interrupted after at least one token; samples that never left the engine's queue do not count."""
        last = {span.sample_id: span for span in self.request_intervals}
        return sum(span.outcome == "interrupted" and span.after > 0 for span in last.values())

    @property
    def staleness(self) -> NDArray[np.int64]:
        """Staleness of each group in versions, shape [N]."""
        return np.array([group.staleness(self.version) for group in self.groups], dtype=np.int64)

    @property
    def tokens_by_age(self) -> NDArray[np.int64]:
        """Consumed policy tokens by age: entry k counts those sampled k versions before this step's."""
        tokens: Counter[int] = Counter()
        for sample in (sample for group in self.groups for sample in group.samples):
            segments = sample.segments
            if len(segments) == 1:  # the usual case
                tokens[segments[0].version] += sample.length
            else:
                for segment in segments:
                    tokens[segment.version] += len(segment)
        tokens.pop(ENVIRONMENT, None)
        by_age = np.zeros(self.version - min(tokens, default=self.version) + 1, np.int64)
        for version, count in tokens.items():
            by_age[self.version - version] = count
        return by_age

    @property
    def off_policy_token_share(self) -> float:
        """Share of the consumed policy tokens that an older version than this step's sampled."""
        ages = self.tokens_by_age
        return float(ages[1:].sum() / max(ages.sum(), 1))

    @property
    def episode_metrics(self) -> dict[str, float]:
        """Metrics of the episodes in the batch and of failed environments; empty without an environment."""
        episodes = [episode for group in self.groups for episode in group.episodes if episode[0].transitions]
        kinds = Counter(failure.kind for failure in self.failures)
        failed = {failure.sample_id for failure in self.failures if failure.kind.startswith("environment")}
        if not episodes:
            return {}
        samples = [sample for episode in episodes for sample in episode]
        turns = [sum(sample.turns for sample in episode) for episode in episodes]
        return {
            "turns_mean": fmean(turns),
            "turns_max": max(turns),
            "sequences_per_episode": len(samples) / len(episodes),
            "environment_seconds": self.environment_seconds / len(episodes),
            "environment_wait_seconds": self.environment_wait_seconds,
            "step_environment_tokens": self.environment_tokens,
            "episodes_failed_share": len(failed) / len(episodes),
            "environment_failures": kinds["environment"],
            "environment_timeouts": kinds["environment timeout"],
            "environments_lost": kinds["environment lost"],
            "episodes_restarted": kinds["environment restart"],
            "episodes_unbridged": sum(sample.finish is FinishReason.BRIDGE for sample in samples),
        }

    @property
    def redraft_metrics(self) -> dict[str, float]:
        """Metrics of the responses whose drafts were sampled under older weights; empty without any."""
        samples = [sample for group in self.groups for sample in group.samples if sample.draft]
        if not samples:
            return {}
        return {
            "samples_redrafted": len(samples),
            "redrafted_tokens": sum(len(sample.draft) for sample in samples),
            "redrafted_tokens_kept": sum(sample.kept_of_draft for sample in samples),
        }

    @property
    def throughput_metrics(self) -> dict[str, float]:
        """Tokens per second; empty for a step that sampled nothing because enough complete groups were left: such a
        step takes microseconds, and its rates would be meaningless."""
        if not self.sampled_tokens:
            return {}
        return {
            "consumed_tokens_per_second": rate(self.consumed_tokens, self.seconds),
            "generated_tokens_per_second": rate(self.sampled_tokens, self.seconds),
        }

    @property
    def forecast_metrics(self) -> dict[str, float]:
        """Forecasts and estimates of admission for the long run; empty without any."""
        plan = self.plan
        expected = {
            "expected_consumed_tokens_per_second": plan.consumed_tokens_per_second,
            "expected_staleness": plan.staleness,
            "resumed_prefill_share": plan.resumed_prefill_share,
        }
        return {name: value for name, value in expected.items() if value is not None}

    def metrics(self) -> dict[str, float]:
        """Return the statistics as numbers for a log, under the same names wherever april runs."""
        return {
            "policy_version": self.version,
            "staleness_mean": float(self.staleness.mean()),
            "staleness_max": int(self.staleness.max()),
            "off_policy_token_share": self.off_policy_token_share,
            "engine_occupancy": self.occupancy,
            "engine_idle_slots": self.idle_slots,
            "over_sampling_batch_size": self.target,
            "groups_buffered": self.buffered_groups,
            "tokens_buffered": self.buffered_tokens,
            "groups_surplus": self.surplus_groups,
            "groups_rejected": len(self.rejections),
            "samples_interrupted": self.interrupted_samples,
            "samples_resumed": self.resumed_samples,
            "engine_failures": sum(failure.kind == "engine" for failure in self.failures),
            "step_consumed_tokens": self.consumed_tokens,
            **self.throughput_metrics,
            **self.forecast_metrics,
            "rollout_seconds": self.seconds,
            "reward_wait_seconds": self.reward_wait_seconds,
            **self.episode_metrics,
            **self.redraft_metrics,
            **({"tokens_behind_stops": self.tokens_behind_stops} if self.tokens_behind_stops else {}),
            **self.reward_metrics,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics, without the groups, as JSON types; `from_dict` restores them."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}
        records = ("request_intervals", "failures", "quarantined")
        return own | {
            "plan": asdict(self.plan),
            **{name: [asdict(item) for item in own[name]] for name in records},
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RolloutBatch:
        own = {
            "plan": Plan(**state["plan"]),
            "request_intervals": [RequestInterval(**span) for span in state["request_intervals"]],
            "failures": [Failure(**failure) for failure in state["failures"]],
            "rejections": [(id, Rejection(reason)) for id, reason in state["rejections"]],
            "quarantined": [Quarantine(**{**one, "reason": Rejection(one["reason"])}) for one in state["quarantined"]],
        }
        return cls(**{**state, **own})
