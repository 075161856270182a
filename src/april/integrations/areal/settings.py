"""AReaL's settings that april reads, and those that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import PPOConfig, SchedulingStrategyType
from areal.utils.environ import is_single_controller

from april.integrations.settings import Settings, at, refuse
from april.rollout.params import RolloutParams

TEXT = "april stops at token ids and never looks at text: leave it out"


UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "rollout._version": ("v1", "april has been run with v1: choose it"),
    "rollout.use_lora": (False, "april has not been run with AReaL's adapters: set it to false"),
    "rollout.return_routed_experts": (False, "april does not record routed experts: set it to false"),
    "gconfig.stop": (None, TEXT),
    "gconfig.min_new_tokens": (0, "april does not forbid a response to end: leave it out"),
    "gconfig.frequency_penalty": (0.0, "log-probabilities would not be those that tokens are drawn with: leave it out"),
    "gconfig.ignore_eos": (False, "april's responses end with the model's end-of-sequence token: set it to false"),
    "gconfig.use_beam_search": (False, "a beam is no sample of the policy: set it to false"),
}
"""AReaL settings that april does not support."""


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
    refuse(UNSUPPORTED, lambda name, default: at(config, name, default))
    if ModelAllocation.from_str(config.rollout.backend, name="rollout").backend != "sglang":
        raise ValueError(f"rollout.backend = {config.rollout.backend}: april has been run with SGLang: choose sglang")
    ranks = ModelAllocation.from_str(config.actor.backend, name="actor").parallel.dp_size
    if ranks != 1 and not is_single_controller():
        raise ValueError(
            f"actor.backend = {config.actor.backend}: under AReaL's SPMD launcher april has been run with one rank: "
            "set d1, or start the script itself with scheduler.type=local"
        )
    for name, other in (("actor", "rollout"), ("rollout", "actor")):
        strategy = getattr(config, name).scheduling_strategy
        if strategy.type == SchedulingStrategyType.colocation and strategy.target == other:
            raise ValueError(
                f"{name}.scheduling_strategy.type = colocation: april generates while AReaL trains; set it to "
                "separation"
            )
    if config.actor.recompute_logprob and not config.actor.use_decoupled_loss:
        raise ValueError(
            "actor.recompute_logprob = True: it forgets the policies that tokens were drawn with; set it to false, or "
            "set actor.use_decoupled_loss"
        )
    params_of(config, settings)
