"""april's settings in verl's configuration, and the check of verl's own settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from april.integrations.rules.rule import check
from april.integrations.rules.verl_rules import RULES
from april.integrations.settings import Settings
from april.rollout.params import RolloutParams

SPELLING = "trainer.v1.april.{}"


def check_settings(config: DictConfig) -> None:
    """Check that april supports verl's settings.

    Raises:
        ValueError: a setting is not supported, or is out of range.
    """

    def value_of(name: str, default: Any) -> Any:
        value = OmegaConf.select(config, name)
        return default if value is None else value

    check(RULES, value_of)
    params_of(config)


def params_of(config: DictConfig) -> RolloutParams:
    """Return the rollout parameters, from `trainer.v1.april`: number of groups in flight and their staleness bound.

    Raises:
        ValueError: a setting is unknown or out of range.
    """
    own = config.trainer.v1.get("april", {}).items()
    given = {name: value for name, value in own if name != "parameter_sync_step"}
    if given.get("over_sampling_batch_size", "") is None:  # null means unset here, but "no bound" for max_staleness
        del given["over_sampling_batch_size"]
    params = Settings.read(given, SPELLING).params(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        {
            "rollout_batch_size": "data.train_batch_size",
            "n_samples_per_prompt": "actor_rollout_ref.rollout.n",
        },
        SPELLING,
    )
    if "over_sampling_batch_size" in given:
        return params
    # Twice N by default, but no more groups than the staleness bound allows.
    twice = 2 * params.rollout_batch_size
    return replace(params, over_sampling_batch_size=min(twice, params.largest_target or twice))
