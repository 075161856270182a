"""april's flags, and the check of OpenRLHF's own."""

from __future__ import annotations

from typing import Any

from april.integrations.rules.openrlhf_rules import RULES
from april.integrations.rules.rule import check
from april.integrations.settings import Settings, at
from april.rollout.params import RolloutParams

SPELLING = "--april.{}"


def params_of(args: Any, settings: Settings) -> RolloutParams:
    """Return the rollout parameters: number of groups in flight and their staleness bound.

    Raises:
        ValueError: a flag is out of range.
    """
    return settings.params(
        args.rollout.batch_size,
        args.rollout.n_samples_per_prompt,
        {"rollout_batch_size": "--rollout.batch_size", "n_samples_per_prompt": "--rollout.n_samples_per_prompt"},
        SPELLING,
    )


def check_settings(args: Any, settings: Settings) -> None:
    """Check that april supports OpenRLHF's flags.

    Raises:
        ValueError: a flag is not supported, or is out of range.
    """
    check(RULES, lambda name, default: at(args, name, default), "--{} = {}")
    params_of(args, settings)
