"""april's settings in slime's arguments, and checks of slime's own.

Invariant: a slime setting that april cannot honour raises an error, or a warning.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

from april.integrations.generating_code import stop_strings
from april.integrations.rules.rule import check
from april.integrations.rules.slime_rules import RULES
from april.integrations.settings import Settings
from april.rollout.params import RolloutParams

OWN = "april_"
SPELLING = OWN + "{} (--custom-config-path)"
"""Format of april's settings in error messages: their name, and where the user sets them."""


@dataclass(frozen=True, kw_only=True)
class SlimeSettings(Settings):
    """april's settings in the file of --custom-config-path. N' defaults to slime's --over-sampling-batch-size."""

    over_sampling_batch_size: Any = None

    @classmethod
    def of(cls, args: Namespace) -> SlimeSettings:
        """Read april's settings from slime's arguments.

        Raises:
            ValueError: a name is unknown, or a value is neither a number nor "auto".
        """
        own = {name.removeprefix(OWN): value for name, value in vars(args).items() if name.startswith(OWN)}
        return cls.read(own, SPELLING)


def check_settings(args: Namespace) -> None:
    """Check that april supports slime's settings.

    Raises:
        ValueError: a setting is not supported, or is out of range.
    """

    def value_of(name: str, default: Any) -> Any:
        return getattr(args, name.replace("-", "_"), default)

    check(RULES, value_of, "--{} {}")
    stop_strings(value_of("rollout-stop", None), "--rollout-stop")
    SlimeSettings.of(args)
    if hasattr(args, "rollout_batch_size"):  # the arguments of slime's contract tests lack it
        params_of(args)


def params_of(args: Namespace) -> RolloutParams:
    """Return the rollout parameters: number of groups in flight and their staleness bound.

    Raises:
        ValueError: a setting is out of range.
    """
    settings = SlimeSettings.of(args)
    names = {"rollout_batch_size": "--rollout-batch-size", "n_samples_per_prompt": "--n-samples-per-prompt"}
    if settings.over_sampling_batch_size is None:
        settings = replace(settings, over_sampling_batch_size=args.over_sampling_batch_size)
        names["over_sampling_batch_size"] = "--over-sampling-batch-size"
    return settings.params(
        args.rollout_batch_size, args.n_samples_per_prompt, names, SPELLING, partial_rollout=args.partial_rollout
    )
