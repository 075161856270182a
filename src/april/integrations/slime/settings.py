"""What april is told in slime, and what of slime's settings it refuses.

Invariant: a setting of slime's that april does not heed is refused, or said to hold for evaluation alone.
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
        "the buffer is april's, which goes on with the oldest and keeps april_max_staleness: leave it out",
    ),
}
"""Settings of slime that would be ignored: the one value each may have, and what to do about another."""

EVALUATION_ONLY = {
    "sglang-server-concurrency": (512, "april asks for all that is under way; --sglang-max-running-requests limits it"),
    "use-distributed-post": (False, "april reads the servers' streams in the rollout manager's process"),
}
"""Settings that hold for slime's own requests alone: the default of each, and what holds for april's."""

OWN = "april_"
SPELLING = OWN + "{} (--custom-config-path)"
"""How the user writes them, and where."""


@dataclass(frozen=True, kw_only=True)
class SlimeSettings(Settings):
    """april's own, in the file of --custom-config-path; N' is as a rule slime's --over-sampling-batch-size."""

    over_sampling_batch_size: Any = None

    @classmethod
    def of(cls, args: Namespace) -> SlimeSettings:
        """Those among slime's arguments.

        Raises:
            ValueError: april has no such setting, or its value is no number.
        """
        own = {name.removeprefix(OWN): value for name, value in vars(args).items() if name.startswith(OWN)}
        return cls.read(own, SPELLING)


def check_settings(args: Namespace) -> None:
    """Refuse what april would have to ignore, or could not keep.

    Raises:
        ValueError: names the setting.
    """

    def value_of(name: str, default: Any) -> Any:
        return getattr(args, name.replace("-", "_"), default)

    refuse(UNSUPPORTED, value_of, "--{} {}")
    for name, (default, instead) in EVALUATION_ONLY.items():
        if value_of(name, default) != default:
            log.warning("--%s holds for evaluation only: %s", name, instead)
    SlimeSettings.of(args)
    if hasattr(args, "rollout_batch_size"):  # slime's own arguments have it, those of its contract tests do not
        params_of(args)


def params_of(args: Namespace) -> RolloutParams:
    """How many groups are under way, and how old they may be.

    Raises:
        ValueError: names the setting.
    """
    settings = SlimeSettings.of(args)
    names = {"rollout_batch_size": "--rollout-batch-size", "n_samples_per_prompt": "--n-samples-per-prompt"}
    if settings.over_sampling_batch_size is None:
        settings = replace(settings, over_sampling_batch_size=args.over_sampling_batch_size)
        names["over_sampling_batch_size"] = "--over-sampling-batch-size"
    return settings.params(
        args.rollout_batch_size, args.n_samples_per_prompt, names, SPELLING, partial_rollout=args.partial_rollout
    )
