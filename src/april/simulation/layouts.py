"""Comparison of the ways to divide a machine's GPUs between engines and trainer.

- synchronous: all GPUs generate a batch, then all train;
- shared: the same GPUs in turn with partial rollouts; unfinished samples wait while the GPUs train;
- split: some GPUs generate while the others train, with overlap.

Engines sleep during training in the first two, and the trainer's state is in host memory during generation. Rates are
consumed tokens per second of the whole time, so a turn's duration counts. A layout is judged by its best N' after its
rate is divided by the additional steps that its staleness costs (`price`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from april.config.recipe import Recipe
from april.simulation.cluster import Cluster
from april.simulation.plan import Point, simulated
from april.simulation.price import MORE_STEPS, worth
from april.simulation.workload import Workload

SYNCHRONOUS, SHARED, SPLIT = "synchronous", "shared", "split"
RATIOS = (1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One division of the GPUs at its best N', against synchronous rollouts."""

    name: str
    """`synchronous`, `shared`, or `split 4+4`: training and generating GPUs."""
    point: Point | None
    """Its best setting; None if it does not fit."""
    reason: str = ""
    """Why it does not fit."""
    ratio: float = 0.0
    """Consumed tokens per second, relative to synchronous rollouts."""
    worth: float = 0.0
    """The same after both rates are divided by the steps that their staleness costs."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(
    recipe: Recipe,
    lengths: Workload,
    cluster: Callable[[int], Cluster],
    gpus: int,
    training: Sequence[int],
    steps: int,
    warm_up: int,
    say: Callable[[str], None] = lambda done: None,
    ratios: Sequence[float] = RATIOS,
) -> list[Layout]:
    """Return synchronous rollouts, the shared layout and the best split, each at its best N'.

    Args:
        cluster: makes the cluster of which a number of GPUs only train; 0 shares all of them.
        training: numbers of training GPUs to try.
        say: called with each simulated setting.
        ratios: values of N' / N that are tried, if the staleness bound allows them.
    """

    def measure(name: str, made: Cluster, chosen: Mapping[str, Any]) -> Point:
        outcome = simulated(recipe, lengths, made, steps, warm_up, chosen, None)
        point = Point.of(outcome, made, name)
        say(f"{name}: {point.overall_tokens_per_second:,.0f} tokens/s trained on")
        return point

    def best(name: str, made: Cluster, overlap: bool) -> Point:
        points = [
            measure(f"{name}, N' = {target}", made, {"over_sampling_batch_size": target, "overlap": overlap, **bound})
            for target in targets(recipe, ratios)
        ]
        return max(points, key=value)

    bound = {"max_staleness": recipe.rollout.max_staleness}
    try:
        alone = cluster(0)
    except ValueError as error:
        shared = [Layout(name=name, point=None, reason=str(error)) for name in (SYNCHRONOUS, SHARED)]
    else:
        points = {
            SYNCHRONOUS: measure(SYNCHRONOUS, alone, {"partial_rollout": False}),
            SHARED: best(SHARED, alone, overlap=False),
        }
        shared = [Layout(name=name, point=point) for name, point in points.items()]
    splits = list(_splits(cluster, gpus, training, best))
    fitting = [layout for layout in splits if layout.point]
    chosen = max(fitting, key=lambda layout: value(layout.point)) if fitting else splits[0]
    return _related([*shared, chosen])


def _splits(
    cluster: Callable[[int], Cluster], gpus: int, training: Sequence[int], best: Callable[[str, Cluster, bool], Point]
) -> Iterator[Layout]:
    for count in training:
        name = f"{SPLIT} {count}+{gpus - count}"
        try:
            made = cluster(count)
        except ValueError as error:
            yield Layout(name=name, point=None, reason=str(error))
        else:
            yield Layout(name=name, point=best(name, made, True))
    if not training:
        yield Layout(name=SPLIT, point=None, reason=f"{gpus} GPU cannot be split")


def targets(recipe: Recipe, ratios: Sequence[float]) -> list[int]:
    """Return the values of N' to try."""
    size, most = recipe.rollout.rollout_batch_size, recipe.rollout.max_staleness + 1
    return sorted({round(ratio * size) for ratio in ratios if ratio <= most} or {size})


def value(point: Point | None) -> float:
    """Return a setting's rate after the price of its staleness; 0 without a setting."""
    return 0.0 if point is None else worth(point.overall_tokens_per_second, point.mean_staleness)


def _related(layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts relative to synchronous rollouts, or to the first that fits."""
    base = next((layout.point for layout in layouts if layout.point), None)
    if base is None:
        return list(layouts)
    return [
        dataclasses.replace(
            layout,
            ratio=layout.point.overall_tokens_per_second / base.overall_tokens_per_second,
            worth=value(layout.point) / value(base),
        )
        if layout.point
        else layout
        for layout in layouts
    ]


def recommended(layouts: Sequence[Layout]) -> Layout:
    """Return the layout with the highest rate after the price of its staleness."""
    return max(layouts, key=lambda layout: layout.worth)


def sentence(layouts: Sequence[Layout], gpus: int) -> str:
    """Return the comparison and the recommendation, in words."""
    machine = f"{gpus} GPU{'s' * (gpus > 1)}"
    fitting = [layout for layout in layouts if layout.point]
    if not fitting:
        return f"{machine}: no layout fits: {layouts[0].reason}."
    base, *others = fitting
    rates = ", ".join(f"{layout.name} {layout.ratio:.2f}" for layout in others)
    text = f"{machine}: {rates} times {base.name}." if others else f"{machine}: {base.name}."
    chosen = recommended(layouts)
    assert chosen.point is not None
    text += f" Recommended: {chosen.name}"
    if chosen.point.mean_staleness >= 0.005:
        price = MORE_STEPS * chosen.point.mean_staleness
        text += (
            f", N' = {chosen.point.over_sampling_batch_size:,}: its data is {chosen.point.mean_staleness:.2f} updates "
            f"old on average, which costs about {price:.0%} more steps (docs/staleness.md); {chosen.worth:.2f} times "
            f"{base.name} remain"
        )
    reasons = "".join(f" {layout.name}: {layout.reason}." for layout in layouts if layout.reason)
    return f"{text}.{reasons}"
