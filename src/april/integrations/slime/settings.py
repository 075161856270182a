"""april's settings in slime's arguments, and checks of slime's own.

Invariant: a slime setting that april cannot honour raises an error, or a warning that it applies to evaluation only.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

from april.integrations.settings import Settings, refuse
from april.rollout.params import RolloutParams

log = logging.getLogger(__name__)

UNSUPPORTED = {
    "rollout-stop": (None, "april stops at token ids and never looks at text: use --rollout-stop-token-ids"),
    "custom-generate-function-path": (None, "april generates itself, one turn a sample: leave it out"),
    "use-rollout-routing-replay": (False, "april does not record routed experts: leave it out"),
    "multimodal-keys": (None, "april's prompts are text: leave it out"),
    "buffer-filter-path": (
        None,
        "the buffer is april's, which resumes the oldest groups and keeps april_max_staleness: leave it out",
    ),
}
"""slime settings that april cannot honour: the only supported value, and the remedy for others."""

EVALUATION_ONLY = {
    "sglang-server-concurrency": (
        512,
        "april sends requests for all groups in flight; --sglang-max-running-requests limits them",
    ),
    "use-distributed-post": (False, "april reads the servers' streams in the rollout manager's process"),
}
"""Settings that apply only to slime's own requests: the default of each, and the rule for april's requests."""

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

    refuse(UNSUPPORTED, value_of, "--{} {}")
    for name, (default, instead) in EVALUATION_ONLY.items():
        if value_of(name, default) != default:
            log.warning("--%s applies to evaluation only: %s", name, instead)
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
