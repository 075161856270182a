"""Table of metrics: title, section, format and aggregation over a run.

Invariants:
- every writer, display, summary and comparison of a metric uses this table;
- a metric without an entry in the table (such as a component of a reward) is shown in the section of its name
  (`section/name`), otherwise in `rollout`, and averaged over a run.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from april.reporting.formats import (
    Format,
    clock,
    compact,
    hundredths,
    percent,
    seconds,
    size,
    tenths,
    thousandths,
    whole,
)


class Over(StrEnum):
    """Aggregation of a metric over several steps."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    Args:
        section: section in trackers.
        label: displayed name, with the unit.
        form: display format of a value.
        over: aggregation of its values over a run.
        weight: the metric by which a mean is weighted; equal weights if None.
        amount: for a rate, the metric whose sum is divided by the sum of `weight`; empty for other metrics.
    """

    name: str
    section: str = "rollout"
    label: str = ""
    form: Format = compact
    over: Over = Over.MEAN
    weight: str | None = None
    amount: str = ""

    @property
    def title(self) -> str:
        return self.label or self.name.replace("_", " ")


def _section(section: str, *rows: tuple[Any, ...]) -> list[Metric]:
    return [Metric(name, section, *rest) for name, *rest in rows]


MEAN, SUM, MAX, LAST = Over
FAILURES = "failures"
"""Section of faults; each of its metrics is a count."""

TABLE: Sequence[Metric] = (
    *_section(
        "reward",
        ("eval_reward", "held-out reward", thousandths, LAST),
        ("accuracy", "held-out accuracy", thousandths, LAST),
        ("reward", "reward", thousandths),
        ("reward_std", "standard deviation of rewards", thousandths),
        ("frac_reward_zero_std", "share of groups with equal rewards", percent),
    ),
    *_section(
        "response",
        ("response_length_mean", "mean response length in tokens", whole),
        ("response_length_p50", "median response length", whole),
        ("response_length_p99", "99th percentile of response lengths", whole),
        ("response_length_max", "longest response", whole, MAX),
        ("response_length_expected", "mean length of the task's responses", whole, LAST),
        ("truncated_share", "share of responses truncated", percent),
    ),
    *_section(
        "throughput",
        ("consumed_tokens_per_second", "consumed tokens/s", whole, MEAN, "rollout_seconds", "step_consumed_tokens"),
        ("generated_tokens_per_second", "generated tokens/s", whole, MEAN, "rollout_seconds"),
        ("expected_consumed_tokens_per_second", "expected consumed tokens/s", whole, LAST),
        ("trained_tokens_per_second", "tokens/s of a training step, prompts included", whole),
        ("mfu", "share of the GPUs' peak that training reaches", percent),
        ("engine_occupancy", "engine slots decoding", percent, MEAN, "rollout_seconds"),
        ("engine_idle_slots", "engine slots without a sample in flight", percent, MEAN, "rollout_seconds"),
        ("resumed_prefill_share", "engines' time in which resumed samples are prefilled", percent, LAST),
        ("step_consumed_tokens", "tokens trained on in a step", whole),
        ("consumed_tokens", "tokens trained on", compact, LAST),
        ("generated_tokens", "tokens generated", compact, LAST),
        ("rejected_tokens", "tokens of rejected groups", compact, LAST),
        ("discarded_tokens", "discarded tokens", compact, LAST),
        ("tokens_behind_stops", "tokens drawn behind stop strings", whole, SUM),
    ),
    *_section(
        "staleness",
        ("staleness_mean", "mean staleness in updates", hundredths, MEAN, "groups_consumed"),
        ("staleness_max", "largest staleness", whole, MAX),
        ("expected_staleness", "expected staleness", hundredths, LAST),
        ("off_policy_token_share", "off-policy tokens", percent, MEAN, "step_consumed_tokens"),
        ("tokens_by_age", "tokens by policy age", whole, SUM),
    ),
    *_section(
        "rollout",
        ("policy_version", "policy version", whole, LAST),
        ("epoch", "epoch", whole, LAST),
        ("records_skipped", "records and prompts left out", whole, LAST),
        ("over_sampling_batch_size", "groups under way (N')", whole),
        ("groups_consumed", "groups trained on", whole, SUM),
        ("groups_rejected", "groups rejected", whole, SUM),
        ("groups_buffered", "groups buffered", whole, LAST),
        ("groups_surplus", "complete groups that wait", whole, LAST),
        ("tokens_buffered", "tokens buffered", compact, LAST),
        ("samples_interrupted", "samples interrupted", whole, SUM),
        ("samples_resumed", "samples resumed", whole, SUM),
        ("samples_redrafted", "samples that began as drafts", whole, SUM),
        ("redrafted_tokens", "tokens of their drafts", whole, SUM),
        ("redrafted_tokens_kept", "tokens of their drafts that were kept", whole, SUM),
        ("turns_mean", "turns of an episode", tenths),
        ("turns_max", "turns of the longest episode", whole, MAX),
        ("step_environment_tokens", "environment tokens of a step", whole),
        ("episodes_failed_share", "episodes with a failing environment", percent),
    ),
    *_section(
        "optimisation",
        ("loss", "loss"),
        ("grad_norm", "gradient norm"),
        ("updated_share", "share of parameters that an update changes", percent),
        ("entropy", "entropy in nats"),
        ("kl_behaviour", "KL to the behaviour policy"),
        ("missing_routes", "tokens whose routes are missing", percent),
        ("ess", "effective sample size of an update", percent),
        ("kl_reference", "KL to the reference policy"),
        ("clip_fraction", "share of tokens clipped", percent),
        ("masked_fraction", "share of tokens masked", percent),
        ("capped_fraction", "share of tokens capped", percent),
        ("ratio_mean", "mean importance ratio"),
        ("ratio_max", "largest importance ratio", compact, MAX),
        ("value_loss", "value loss"),
        ("value_grad_norm", "gradient norm of the critic"),
        ("lr", "learning rate", compact, LAST),
    ),
    *_section(
        "time",
        ("seconds", "wall clock", clock, LAST),
        ("rollout_seconds", "rollout", seconds, SUM),
        ("train_seconds", "training", seconds, SUM),
        ("overlap_seconds", "rollout beside training", seconds, SUM),
        ("eval_seconds", "evaluation", seconds, SUM),
        ("update_seconds", "handing the weights over", seconds, SUM),
        ("exchange_seconds", "exchange of shared devices", seconds, SUM),
        ("canary_gap", "largest mean difference of an engine's log-probabilities after an update", thousandths, MAX),
        ("reward_wait_seconds", "waiting for rewards", seconds, SUM),
        ("environment_wait_seconds", "waiting for environments alone", seconds, SUM),
        ("environment_seconds", "environment's share of an episode", seconds),
    ),
    *_section(
        "engines",
        ("engines", "engines", whole, LAST),
        ("engines_ready", "engines that are ready", whole, LAST),
        ("engines_used", "engines that were given samples", whole, LAST),
        ("nodes", "nodes that they work on", whole, LAST),
        ("update_bytes", "bytes of a weight update", size, LAST),
    ),
    *_section(
        "memory",
        ("buffer_bytes", "buffered responses, in memory", size, MAX),
        ("kv_cache_bytes", "keys and values, most held", size, MAX),
        ("resident_bytes", "resident memory, peak", size, MAX),
    ),
    *_section(
        FAILURES,
        ("reward_failures", "reward errors", whole, SUM),
        ("reward_timeouts", "reward timeouts", whole, SUM),
        ("filter_failures", "errors of the dynamic filter", whole, SUM),
        ("responses_unjudged", "responses that could not be scored", whole, SUM),
        ("engine_failures", "engine requests failed", whole, SUM),
        ("engines_lost", "engines lost", whole, SUM),
        ("environment_failures", "environment errors", whole, SUM),
        ("environment_timeouts", "environment timeouts", whole, SUM),
        ("environments_lost", "environments lost, and made anew", whole, SUM),
        ("episodes_restarted", "episodes begun again", whole, SUM),
        ("episodes_unbridged", "episodes that could not be bridged", whole, SUM),
        ("groups_quarantined", "groups quarantined", whole, SUM),
        ("skipped_updates", "updates skipped", whole, SUM),
        ("out_of_memory", "out of memory", whole, SUM),
    ),
    *_section(
        "comparison",
        ("time_to_target", "seconds to target", tenths, LAST),
        ("overall_tokens_per_second", "consumed tokens/s, training counted", whole, LAST),
        ("slots", "engine slots", whole, LAST),
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in TABLE}
RATES = [(metric.name, metric.amount, metric.weight) for metric in TABLE if metric.amount and metric.weight]
"""Metrics that amount to one sum divided by another over a run, steps without a value of their own included: name,
dividend, divisor."""


def busy_seconds(metrics: Mapping[str, Any]) -> float:
    """Return the seconds of rollouts and training in a step or run; overlapping time counts once."""
    rollout, training, overlap = (
        metrics.get(name) or 0.0 for name in ("rollout_seconds", "train_seconds", "overlap_seconds")
    )
    return float(rollout + training - overlap)


def metric(name: str) -> Metric:
    """The metric of that name, in the table or not."""
    if name in METRICS:
        return METRICS[name]
    section, slash, rest = name.rpartition("/")
    return Metric(name, section, rest.replace("_", " ")) if slash else Metric(name)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def show(name: str, value: float | None, none: str = "–") -> str:
    """A metric's value for people."""
    return none if value is None else metric(name).form(value)


def plotted(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that a tracker can plot: numbers as `section/name`, elements of lists as `name/index`."""
    numbers_of: dict[str, float] = {}
    for name, value in record.items():
        if name == "step":
            continue
        if is_number(value):
            numbers_of[name if "/" in name else f"{metric(name).section}/{name}"] = float(value)
        elif isinstance(value, list | tuple):
            numbers_of |= {f"{name}/{index}": float(item) for index, item in enumerate(value) if is_number(item)}
    return numbers_of


def failures_in(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of the faults in a record or summary, by display name; without zeros."""
    return {m.label: int(record[m.name]) for m in TABLE if m.section == FAILURES and record.get(m.name)}


def counted(failures: Mapping[str, int]) -> str:
    """Return the result of `failures_in` as text."""
    return ", ".join(f"{name} {whole(times)}" for name, times in failures.items())


def condensed(name: str, values: Iterable[Any]) -> Any:
    """Values of neighbouring steps as one, to plot: the sum of lists by element, else by `Over`, where a sum becomes
    the mean of a step. None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], list):
        return [sum(items) for items in zip(*_padded(known), strict=True)]
    over = metric(name).over
    if over is LAST or not is_number(known[0]):
        return known[-1]
    return max(known) if over is MAX else float(sum(known)) / len(known)


def _padded(lists: Sequence[Sequence[float]]) -> list[list[float]]:
    longest = max(map(len, lists))
    return [[*items, *[0] * (longest - len(items))] for items in lists]
