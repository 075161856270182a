"""april's settings in SkyRL's configuration, and the check of SkyRL's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.train.config import SkyRLTrainConfig

from april.integrations.rules.rule import check
from april.integrations.rules.skyrl_rules import RULES
from april.integrations.settings import Settings, at
from april.rollout.params import RolloutParams


def settings_of(cfg: SkyRLTrainConfig, given: Mapping[str, Any]) -> Settings:
    """Return april's settings. In fully asynchronous training, SkyRL's limits are the defaults.

    Args:
        given: the settings that the user gives, by name.

    Raises:
        ValueError: a name is unknown, or a value is neither a number nor "auto".
    """
    limits = cfg.trainer.fully_async
    defaults = {
        "over_sampling_batch_size": limits.num_parallel_generation_workers,
        "max_staleness": limits.max_staleness_steps,
    }
    return Settings.read({**(defaults if limits.enabled else {}), **given})


def params_of(cfg: SkyRLTrainConfig, settings: Settings) -> RolloutParams:
    """Return the rollout parameters: number of groups in flight and their staleness bound.

    Raises:
        ValueError: a setting is out of range.
    """
    return settings.params(
        cfg.trainer.train_batch_size,
        cfg.generator.n_samples_per_prompt,
        {
            "rollout_batch_size": "trainer.train_batch_size",
            "n_samples_per_prompt": "generator.n_samples_per_prompt",
        },
    )


def check_settings(cfg: SkyRLTrainConfig, settings: Settings) -> None:
    """Check that april supports SkyRL's settings.

    Raises:
        ValueError: a setting is not supported, or is out of range.
    """
    check(RULES, lambda name, default: at(cfg, name, default))
    params_of(cfg, settings)
