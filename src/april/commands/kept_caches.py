"""Advice to keep KV caches over weight updates, from the results of a run or a profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from april.config.error import ConfigError
from april.config.keep_advice import WORTHWHILE, keep_advice
from april.config.recipe import Recipe
from april.reporting.formats import clock
from april.reporting.run_log import SUMMARY
from april.simulation.recorded import PROFILE
from april.training.resume import RECIPE


def advice_of_run(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    """Return the advice from the summary of a finished run in one line; "" if there is none."""
    share, seconds = summary.get("resumed_prefill_share"), summary.get("rollout_seconds") or 0.0
    return keep_advice(recipe, share, f"{clock((share or 0.0) * seconds)} of {clock(seconds)} of rollouts")


def advice_from(recipe: Recipe, directory: Path) -> str:
    """Return the advice from the directory of a finished run or of a profile in one line; without advice, the reason.

    Raises:
        ConfigError: neither a finished run nor a profile is in the directory.
    """
    for name in (SUMMARY, PROFILE):
        try:
            found = json.loads((directory / name).read_text())
            # A profile simulates several settings; the recommended one counts.
            measured = _figures(found["recommended"] if name == PROFILE else found)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _unusable(directory, name, error) from None
        share = measured["resumed_prefill_share"]
        if not recipe.rollout.partial_rollout:
            return "rollout.partial_rollout = false: no response is resumed, so no KV cache is worth keeping"
        if share is None:
            return f"{directory} has no share of resumed prefill: only runs with automatic N' and profiles have one"
        if _on_update(directory) == "keep":
            return f'{directory} had engine.on_update = "keep", so it cannot tell what keeping KV caches saves'
        if advice := advice_of_run(recipe, measured):
            return f"{advice} (measured in {directory})"
        enough = f": below {WORTHWHILE:.0%}, so KV caches are not worth keeping" * (share < WORTHWHILE)
        return f"prefill of resumed responses took {share:.1%} of the engines' time in {directory}{enough}"
    raise ConfigError(
        f"--run {directory}: neither a finished run ({SUMMARY}) nor a profile ({PROFILE}) is in this directory"
    )


def _figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the share of resumed prefill, None if there is none, and the duration of rollouts.

    Raises:
        ValueError: a figure is no number, or is outside its range.
    """
    share: Any = found.get("resumed_prefill_share")
    seconds: Any = found.get("rollout_seconds")
    numbers = all(type(figure) in (int, float) for figure in (share, seconds))
    if share is not None and not (numbers and 0 <= share <= 1 and 0 < seconds < inf):
        raise ValueError(f"resumed_prefill_share = {share!r}, rollout_seconds = {seconds!r}")
    return {"resumed_prefill_share": share, "rollout_seconds": seconds}


def _on_update(directory: Path) -> str:
    """Return how the run or profile in the directory treated KV caches at weight updates."""
    try:
        return str(json.loads((directory / RECIPE).read_text())["engine"]["on_update"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unusable(directory, RECIPE, error) from None


def _unusable(directory: Path, name: str, error: Exception) -> ConfigError:
    return ConfigError(f"--run {directory}: {name} is not one that april wrote: {error!r}")
