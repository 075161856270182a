"""Advice to keep KV caches over weight updates, for simulated and for finished runs.

With `on_update = "recompute"` engines prefill unfinished responses again after each weight update. `keep` saves this
time at a small price in accuracy: later tokens attend to keys and values of older policies. So the advice is given only
where the time is worth a change (`docs/reports/re-prefill.md`).
"""

from __future__ import annotations

import copy

from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe

WORTHWHILE = 0.05
"""Share of the engines' time, in which resumed responses are prefilled, from which a kept KV cache is advised."""


def keep_advice(recipe: Recipe, share: float | None, saved: str) -> str:
    """Return the advice in one line; "" if little is saved, or if the recipe must not keep KV caches.

    Args:
        share: share of the engines' time in which resumed responses are prefilled; None if unknown.
        saved: the time that this takes, with its unit and the time that it is part of.
    """
    if share is None or share < WORTHWHILE or recipe.engine.on_update != "recompute" or not _may_keep(recipe):
        return ""
    return (
        f'prefill of resumed responses takes {share:.0%} of the engines\' time: engine.on_update = "keep" would save '
        f"about {saved}, and later tokens then attend to keys and values of older policies"
    )


def _may_keep(recipe: Recipe) -> bool:
    """Whether the recipe breaks no further rule with KV caches that are kept over weight updates."""
    keeping = copy.deepcopy(recipe)
    keeping.engine.on_update = "keep"
    return _broken_rules(keeping) <= _broken_rules(recipe)


def _broken_rules(recipe: Recipe) -> set[str]:
    try:
        check_recipe(recipe, loads=False)
    except ConfigError as error:
        return set(str(error).splitlines())
    return set()
