"""Rollout parameters in AReaL's configuration, and the check of AReaL's settings."""

from __future__ import annotations

from areal.api.cli_args import PPOConfig

from april.integrations.rules.areal_rules import RULES
from april.integrations.rules.rule import check
from april.integrations.settings import Settings, at
from april.rollout.params import RolloutParams


def params_of(config: PPOConfig, settings: Settings) -> RolloutParams:
    """Return the rollout parameters: number of groups in flight and their staleness bound.

    Raises:
        ValueError: a setting is out of range.
    """
    return settings.params(
        config.train_dataset.batch_size,
        config.gconfig.n_samples,
        {
            "rollout_batch_size": "train_dataset.batch_size",
            "n_samples_per_prompt": "gconfig.n_samples",
            "over_sampling_batch_size": "over_sampling_batch_size",
            "max_staleness": "rollout.max_head_offpolicyness",
        },
    )


def check_settings(config: PPOConfig, settings: Settings) -> None:
    """Check that april supports AReaL's settings.

    Raises:
        ValueError: a setting is not supported, or is out of range.
    """
    check(RULES, lambda name, default: at(config, name, default))
    params_of(config, settings)
