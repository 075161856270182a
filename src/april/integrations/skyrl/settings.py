"""SkyRL's settings that april reads, and those that april does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
from skyrl.backends.skyrl_train.utils.ppo_utils import LOSSES_WITHOUT_OLD_LOGPROBS
from skyrl.train.config import SkyRLTrainConfig

from april.integrations.settings import Settings, at, refuse
from april.rollout.params import RolloutParams

ENGINE = "generator.inference_engine"
ONE_TURN = "april generates one turn a sample: leave it out"
TEXT = "april's prompts are text: leave it out"
UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "trainer.fully_async.enabled": (
        False,
        "april keeps unfinished samples across steps of the synchronous trainer: leave it out",
    ),
    "trainer.policy.model.lora.rank": (0, "april has not been run with SkyRL's adapters: leave it out"),
    "generator.max_turns": (1, ONE_TURN),
    "generator.step_wise_trajectories": (False, ONE_TURN),
    "generator.vision_language_generator": (False, TEXT),
    "generator.chat_template.name_or_path": (
        None,
        "it renders responses again, which loses log-probabilities: leave it out",
    ),
    "generator.sampling_params.stop": (None, "april stops at token ids and never looks at text: leave it out"),
    "generator.sampling_params.additional_kwargs": (None, "april does not know what they mean: leave it out"),
    f"{ENGINE}.backend": ("vllm", "april has been run with vllm: choose it"),
    f"{ENGINE}.enable_pd": (False, "prefill and decode on separate servers are not supported: set it to false"),
    f"{ENGINE}.enable_return_routed_experts": (False, "april does not record routed experts: set it to false"),
    f"{ENGINE}.enable_return_sample_support_set": (
        False,
        "april does not record which tokens top-k kept: set it to false",
    ),
}
"""SkyRL settings that april does not support."""


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
    refuse(UNSUPPORTED, lambda name, default: at(cfg, name, default))
    drawn, algorithm = cfg.generator.sampling_params, cfg.trainer.algorithm
    if drawn.logprobs is None:
        raise ValueError("generator.sampling_params.logprobs = None: the correction needs them; set it to 1")
    plain = drawn.temperature == 1 and drawn.top_p == 1 and drawn.top_k <= 0 and not drawn.min_p
    mode = cfg.generator.inference_engine.engine_init_kwargs.get("logprobs_mode")
    if not plain and mode != "processed_logprobs":
        raise ValueError(
            f"{ENGINE}.engine_init_kwargs.logprobs_mode = {mode}: with a temperature, top_p, top_k or min_p, vLLM "
            "reports log-probabilities that tokens were not drawn with; set it to processed_logprobs"
        )
    anchored = algorithm.policy_loss_type == "cispo" and algorithm.cispo.cispo_anchor == "rollout"
    corrected = off_policy_correction_enabled(algorithm.off_policy_correction) or anchored
    if not corrected and algorithm.policy_loss_type not in LOSSES_WITHOUT_OLD_LOGPROBS:
        raise ValueError(
            "trainer.algorithm.off_policy_correction.tis_ratio_type = None: some tokens are of older policies, which "
            "only the correction accounts for; set it to token, or another"
        )
    params_of(cfg, settings)
