"""april's settings in verl's configuration, and verl's settings that april refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from april.integrations.settings import Settings, refuse
from april.rollout.params import RolloutParams

SAMPLER = {"path": f"pkg://{__package__}", "name": "AprilReplayBuffer"}


MANAGER = f"{__package__}.AprilRolloutManager"


SPELLING = "trainer.v1.april.{}"


UNSUPPORTED = {
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": (
        False,
        "april does not record routed experts: set it to false",
    ),
    "actor_rollout_ref.rollout.disaggregation.enabled": (
        False,
        "prefill and decode on separate servers are not supported: set it to false",
    ),
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": (MANAGER, "april brings its own: leave it out"),
    "trainer.v1.sampler.custom_sampler.name": (SAMPLER["name"], "april brings its own: leave it out"),
    "trainer.v1.april.parameter_sync_step": (
        1,
        "the replicas sleep while the policy is trained, so its weights go to them after every step: leave it out; "
        "for several updates a step, set actor_rollout_ref.actor.ppo_mini_batch_size",
    ),
}
"""verl settings that april does not support."""


def check_settings(config: DictConfig) -> None:
    """Check that april supports verl's settings.

    Raises:
        ValueError: a setting is not supported, or is out of range.
    """

    def value_of(name: str, only: Any) -> Any:
        value = OmegaConf.select(config, name)
        return only if value is None else value

    refuse(UNSUPPORTED, value_of)
    if config.algorithm.adv_estimator == "remax":
        raise ValueError(
            "algorithm.adv_estimator = remax: april does not generate its greedy baselines: choose another estimator"
        )
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
