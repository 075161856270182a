"""Simulation of a recipe on a cluster with several values of N', and the recommended setting.

The recommended setting is the least stale one that reaches `GOOD_ENOUGH` of the best rate, after each rate is divided
by the additional steps that its staleness costs (`price`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from april.config.error import ConfigError
from april.config.keep_advice import keep_advice
from april.config.recipe import Recipe
from april.config.settings.engine_settings import EngineSettings
from april.simulation.cluster import Cluster
from april.simulation.price import MORE_STEPS, worth
from april.simulation.run import Outcome, simulate
from april.simulation.turns import Turns
from april.simulation.workload import Workload

GOOD_ENOUGH = 0.97
CUT = 0.5
"""Share of truncated responses above which the distribution of lengths hardly matters."""
FULL, SPARE = 0.85, 0.7
"""Slots limit a setting if at least `FULL` of them decode and at most `SPARE` of the KV cache is used."""
EMPTY = 0.1
"""Share of slots that decode below which a cluster is far too large for a recipe."""
RATIOS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Values of N' / N that are tried, if the staleness bound allows them."""

SYNCHRONOUS, AUTOMATIC, OVERLAPPING = "synchronous", "automatic", "overlap"
BASELINE = "synchronous, all GPUs"
"""The usual way: every GPU generates, then every GPU trains."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting and its results. Rates are tokens per second, times seconds per step."""

    name: str
    over_sampling_batch_size: int
    """N' of the setting, or the mean N' if it is chosen automatically."""
    synchronous: bool
    automatic: bool
    overlapping: bool
    """Generation overlaps with training; the rollout phase is then the whole step."""
    overall_tokens_per_second: float
    """Consumed tokens, over the whole time; the other rates are over the rollout phase."""
    consumed_tokens_per_second: float
    generated_tokens_per_second: float
    step_seconds: float
    rollout_seconds: float
    occupancy: float
    mean_staleness: float
    p99_staleness: float
    max_staleness: int
    off_policy_token_share: float
    peak_kv: float
    preemptions: int
    prefill_share: float
    """Share of the engines' time of the rollout phase, in all steps, in which they prefill."""
    resumed_prefill_share: float
    """The part of `prefill_share` of resumed responses, whose KV caches weight updates have dropped."""
    cost_per_million_tokens: float | None
    """Cost of rollout, weight update and training per million consumed tokens; None if GPUs have no price."""

    @classmethod
    def of(cls, outcome: Outcome, cluster: Cluster, name: str) -> Point:
        steps, hourly = len(outcome.counted), cluster.price and cluster.price * cluster.gpus
        engine_seconds = cluster.engines * sum(step.seconds for step in outcome.steps)
        tokens = sum(step.consumed_tokens for step in outcome.counted)
        return cls(
            name=name,
            over_sampling_batch_size=round(sum(step.target for step in outcome.counted) / steps),
            synchronous=name in (SYNCHRONOUS, BASELINE),
            automatic=name.startswith(AUTOMATIC),
            overlapping=name.endswith(OVERLAPPING),
            overall_tokens_per_second=outcome.overall_tokens_per_second,
            consumed_tokens_per_second=outcome.consumed_tokens_per_second,
            generated_tokens_per_second=outcome.generated_tokens_per_second,
            step_seconds=outcome.seconds / steps,
            rollout_seconds=outcome.rollout_seconds / steps,
            occupancy=outcome.occupancy,
            mean_staleness=outcome.mean_staleness,
            p99_staleness=float(np.percentile(outcome.staleness, 99)),
            max_staleness=outcome.max_staleness,
            off_policy_token_share=outcome.off_policy_token_share,
            peak_kv=outcome.peak_kv,
            preemptions=outcome.preemptions,
            prefill_share=outcome.prefill_seconds / engine_seconds,
            resumed_prefill_share=outcome.resumed_prefill_seconds / engine_seconds,
            cost_per_million_tokens=None if hourly is None else 1e6 * outcome.seconds / tokens * hourly / 3600,
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def workload_of(recipe: Recipe, lengths: Workload) -> Workload:
    """Return the workload with the recipe's batch sizes and response budget."""
    rollout = recipe.rollout
    return dataclasses.replace(
        lengths,
        max_tokens=rollout.max_response_length,
        rollout_batch_size=rollout.rollout_batch_size,
        n_samples_per_prompt=rollout.n_samples_per_prompt,
        seed=recipe.training.seed,
    )


def targets(recipe: Recipe) -> list[int]:
    """Return the values of N' to try: multiples of N that the staleness bound allows, and the recipe's own value."""
    params = recipe.rollout_params(partial_rollout=True)
    batch_size, bound = params.rollout_batch_size, params.max_staleness
    # Within a bound of b updates at most (b + 1) N groups may be in the buffer (`RolloutParams`).
    tried = {round(ratio * batch_size) for ratio in RATIOS if bound is None or ratio <= bound + 1}
    own = params.over_sampling_batch_size
    return sorted(tried | ({own} if isinstance(own, int) else set()))


def refuse_speculation(engine: EngineSettings) -> None:
    """Refuse an engine that speculates: neither a simulated engine nor a measured cost model does.

    Raises:
        ConfigError: the options of the servers enable speculative decoding.
    """
    if option := engine.speculative_option:
        raise ConfigError(
            f"engine.server_args names {option}: how many drafted tokens are accepted depends on the policy, which no "
            "cost model knows (docs/reports/simulation.md); use a recipe without this option"
        )


def arms(recipe: Recipe, overlap: bool = False) -> dict[str, dict[str, Any]]:
    """Return the scheduler settings to simulate, by name.

    These are synchronous rollouts, then partial rollouts under the recipe's policy with each of `targets` and, if there
    is a staleness bound, with N' chosen automatically. With `overlap` each setting with partial rollouts is repeated
    with generation that overlaps with training.

    Raises:
        ConfigError: the recipe has a setting that is not simulated.
    """
    if recipe.engine.on_update == "redraft":
        raise ConfigError(
            'engine.on_update = "redraft" is not simulated: how much of a draft is kept depends on the policy; add '
            "--on-update recompute"
        )
    refuse_speculation(recipe.engine)
    params = recipe.rollout_params(partial_rollout=True)
    policy = {name: getattr(params, name) for name in ("max_staleness", "first_come")}
    automatic = {} if params.max_staleness is None else {AUTOMATIC: {"over_sampling_batch_size": "auto", **policy}}
    fixed = {f"N' = {target:,}": {"over_sampling_batch_size": target, **policy} for target in targets(recipe)}
    partial = {**fixed, **automatic}
    overlapping = {f"{name}, {OVERLAPPING}": {**chosen, "overlap": True} for name, chosen in partial.items()}
    return {SYNCHRONOUS: {"partial_rollout": False}, **partial, **(overlapping if overlap else {})}


def explore(
    recipe: Recipe,
    lengths: Workload,
    cluster: Cluster,
    steps: int,
    warm_up: int,
    turns: Turns | None = None,
    baseline: Cluster | None = None,
) -> Iterator[Point]:
    """Simulate each of `arms`, with overlap if recipe and cluster have it.

    Args:
        baseline: the same GPUs, all of which generate and train in turn, for synchronous rollouts, which come first.
    """
    if baseline is not None:
        alone = {"partial_rollout": False}
        yield Point.of(simulated(recipe, lengths, baseline, steps, warm_up, alone, turns), baseline, BASELINE)
    for name, chosen in arms(recipe, recipe.overlaps and cluster.separate).items():
        yield Point.of(simulated(recipe, lengths, cluster, steps, warm_up, chosen, turns), cluster, name)


def overlapping_rate(
    recipe: Recipe, lengths: Workload, cluster: Cluster, steps: int, warm_up: int, turns: Turns | None = None
) -> float:
    """Return consumed tokens per second with generation that overlaps with training, at about N' = 2 N."""
    size = recipe.rollout.rollout_batch_size
    chosen = min((arm for arm in arms(recipe).values() if _target(arm)), key=lambda arm: abs(_target(arm) - 2 * size))
    outcome = simulated(recipe, lengths, cluster, steps, warm_up, {**chosen, "overlap": True}, turns)
    return outcome.overall_tokens_per_second


def _target(arm: Mapping[str, Any]) -> int:
    """Return the N' that an arm sets; 0 if it sets none."""
    target = arm.get("over_sampling_batch_size")
    return target if isinstance(target, int) else 0


def simulated(
    recipe: Recipe,
    lengths: Workload,
    cluster: Cluster,
    steps: int,
    warm_up: int,
    chosen: Mapping[str, Any],
    turns: Turns | None,
) -> Outcome:
    """Simulate the recipe with one of `arms`."""
    return simulate(
        workload_of(recipe, lengths),
        cluster.cost,
        replicas=cluster.engines,
        steps=steps,
        warm_up=warm_up,
        on_update=recipe.engine.on_update,
        train_token_seconds=cluster.train_token_seconds,
        # Ten decode steps are far less than a rollout step, and group the events of a large cluster.
        resolution=0.0 if cluster.engines == 1 else min(0.1, 10 * cluster.cost.decode_seconds[-1]),
        turns=turns,
        seed=recipe.training.seed,
        **chosen,
    )


def over_everything(points: Sequence[Point]) -> bool:
    """Whether rates of the rollout phase cannot be compared, because training overlaps or uses other GPUs in some."""
    return any(point.overlapping or point.name == BASELINE for point in points)


def rate_of(points: Sequence[Point]) -> Callable[[Point], float]:
    """Return the rate to compare points by: consumed tokens per second, over the whole time or the rollout phase."""
    if over_everything(points):
        return lambda point: point.overall_tokens_per_second
    return lambda point: point.consumed_tokens_per_second


def recommended(points: Sequence[Point], more_steps: float = MORE_STEPS) -> Point:
    """Return the least stale setting with a fixed N' whose rate, priced by staleness, is `GOOD_ENOUGH` of the best.

    Args:
        more_steps: price of staleness; with 0 only throughput counts.
    """
    fixed = [point for point in points if not point.automatic]
    rate_by = rate_of(points)

    def rate(point: Point) -> float:
        # In a short run, consumed tokens may exceed generated ones, as some were generated before the counted steps.
        kept = min(1.0, point.generated_tokens_per_second / point.consumed_tokens_per_second)
        return worth(rate_by(point) * kept, point.mean_staleness, more_steps)

    best = max(map(rate, fixed))
    enough = (point for point in fixed if rate(point) >= GOOD_ENOUGH * best)
    return min(enough, key=lambda point: (point.mean_staleness, point.over_sampling_batch_size))


def advice(points: Sequence[Point], chosen: Point, slots: int) -> str:
    """Return advice on cluster or recipe in one or two sentences; "" if there is none.

    Args:
        slots: slots of an engine.
    """
    fullest = max((point for point in points if point.name != BASELINE), key=lambda point: point.occupancy)
    if fullest.occupancy >= FULL and fullest.peak_kv <= SPARE:
        # The number of slots that would fill the KV cache, in multiples of 8.
        more = max(int(slots / max(fullest.peak_kv, 0.01)) // 8 * 8, slots + 1)
        return (
            f"Slots limit you: with {fullest.name}, {fullest.occupancy:.0%} of an engine's {slots} slots decode, and "
            f"at most {fullest.peak_kv:.0%} of its KV cache is used. Raise engine.max_num_seqs, to about {more}."
        )
    if chosen.occupancy >= EMPTY:
        return ""
    return (
        f"The recipe's steps are small for so many engines: with {chosen.name}, {chosen.occupancy:.1%} of their slots "
        "decode. Try fewer --gpus, or a larger rollout_batch_size."
    )


def kept_caches(recipe: Recipe, chosen: Point) -> str:
    """Return the advice to keep KV caches over weight updates, for the recommended setting; "" if there is none."""
    share = chosen.resumed_prefill_share
    saved = f"{share * chosen.rollout_seconds:,.1f} s of a rollout of {chosen.rollout_seconds:,.1f} s"
    said = keep_advice(recipe, share, saved)
    return said and f"With {chosen.name}, {said}."


def cut_off(workload: Workload) -> str:
    """Return a warning if the response budget truncates many responses of a workload; "" otherwise."""
    share = float((workload.sample(4096) >= workload.max_tokens).mean())
    if share < CUT:
        return ""
    return (
        f"{share:.0%} of the responses reach max_response_length = {workload.max_tokens:,} and are cut off there: so "
        "most have the same length, and these figures do not apply to other lengths. Use a larger budget, or lengths "
        "that fit it (--lengths-from RUN, --workload)."
    )


def quantiles(workload: Workload) -> str:
    """Return quantiles of a workload's response lengths, as text."""
    half, most, nearly = np.percentile(workload.sample(4096), (50, 90, 99))
    return f"half have {half:,.0f} tokens or fewer, 90 % {most:,.0f}, 99 % {nearly:,.0f}"
