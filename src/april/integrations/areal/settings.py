"""Rollout parameters in AReaL's configuration, and the check of AReaL's settings."""

from __future__ import annotations

from areal.api import ModelRequest
from areal.api.cli_args import PPOConfig

from april.integrations.generating_code import stop_strings
from april.integrations.rules.areal_rules import RULES
from april.integrations.rules.rule import check
from april.integrations.settings import Settings, at
from april.rollout.params import RolloutParams

REQUEST_RULES = [rule for rule in RULES if rule.setting.startswith("gconfig.")]


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
    stop_strings(config.gconfig.stop, "gconfig.stop")
    params_of(config, settings)


def check_request(request: ModelRequest) -> None:
    """Check that april supports the sampling settings of a workflow's request, which may differ from the configuration.

    Raises:
        ValueError: a setting is not supported.
    """
    check(REQUEST_RULES, lambda name, default: at(request, name, default), "the workflow requests {} = {}")
