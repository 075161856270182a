"""Rules of a recipe's algorithm that involve more than the type of one setting."""

from __future__ import annotations

from collections.abc import Iterator

from april.algorithms.catalogue import CORRECTIONS, UNBOUNDED, algorithm
from april.config.reading import nearest
from april.config.recipe import Recipe
from april.config.settings.algorithm_settings import AlgorithmSettings


def algorithm_problems(recipe: Recipe) -> Iterator[str]:
    """Yield an error message for each rule that the algorithm settings or their rollouts break."""
    try:
        chosen = algorithm(recipe.algorithm.algorithm)
    except ValueError as error:
        yield str(error)
    else:
        if chosen.group_baseline:
            yield from _baseline_problems(recipe)
        if chosen.value_head and recipe.environment.is_program and recipe.algorithm.turn_discount is not None:
            yield (
                f"algorithm.turn_discount: not with {chosen.name} and a program, whose next turn may be in another "
                "sequence, where the critic has no value of it; remove it"
            )
        yield from _correction_problems(recipe.algorithm)


def _baseline_problems(recipe: Recipe) -> Iterator[str]:
    """Check settings under which all samples of a prompt have equal rewards, so that relative advantages are 0."""
    name, rollout = recipe.algorithm.algorithm, recipe.rollout
    others = "choose reinforce_plus_plus or ppo"
    if rollout.n_samples_per_prompt == 1:
        yield (
            f"rollout.n_samples_per_prompt = 1: {name} compares the samples of a prompt with each other, so a "
            f"single sample is never trained on; set 2 or more, or {others}"
        )
    if rollout.temperature == 0 and not recipe.environment.enabled:
        yield (
            f"rollout.temperature = 0: all samples of a prompt are equal, {name} compares them with each other, "
            f"and nothing is trained on; raise it, or {others}"
        )


def _correction_problems(settings: AlgorithmSettings) -> Iterator[str]:
    name = settings.correction_in_use
    if name not in CORRECTIONS:
        yield f"algorithm.correction = {name!r}: {nearest(name, list(CORRECTIONS))}"
        return
    rule, own = CORRECTIONS[name], settings.correction_bounds
    for bound in own:
        if bound not in rule.bounds and bound != "max_age":
            having = ", ".join(kind for kind, other in CORRECTIONS.items() if bound in other.bounds)
            yield (
                f"algorithm.correction_{bound} does not apply to correction = {name!r}: remove it, or choose one of "
                f"{having}"
            )
    bounds = rule.bounds | own
    if "low" in bounds and bounds["low"] > bounds.get("high", UNBOUNDED):
        yield (
            f"algorithm.correction_low = {bounds['low']:g} is above correction_high = {bounds['high']:g}: nothing "
            "would be left to train on"
        )
