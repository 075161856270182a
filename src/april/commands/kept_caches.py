"""Advice to keep KV caches over weight updates, from the results of a run or a profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.config.error import ConfigError
from april.config.keep_advice import WORTHWHILE, keep_advice
from april.config.recipe import Recipe
from april.reporting.formats import clock
from april.reporting.run_log import SUMMARY
from april.simulation.recorded import PROFILE


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
            found = found["recommended"] if name == PROFILE else found
            values = {each: found.get(each) for each in ("resumed_prefill_share", "rollout_seconds")}
            measured = {each: value if value is None else float(value) for each, value in values.items()}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"--run {directory}: {name} is not one that april wrote: {error!r}") from None
        share = measured["resumed_prefill_share"]
        if advice := advice_of_run(recipe, measured):
            return f"{advice} (measured in {directory})"
        if share is None:
            return f"{directory} has no share of resumed prefill: only runs with automatic N' and profiles have one"
        enough = f": below {WORTHWHILE:.0%}, so KV caches are not worth keeping" * (share < WORTHWHILE)
        return f"prefill of resumed responses took {share:.1%} of the engines' time in {directory}{enough}"
    raise ConfigError(
        f"--run {directory}: neither a finished run ({SUMMARY}) nor a profile ({PROFILE}) is in this directory"
    )
