"""april's flags, and OpenRLHF's flags that april does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from april.integrations.settings import Settings, at, refuse
from april.rollout.params import RolloutParams

UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "train.async_enable": (
        False,
        "april keeps unfinished samples across steps of the synchronous trainer: leave it out",
    ),
    "train.partial_rollout_enable": (False, "april does partial rollouts itself: leave it out"),
    "train.agent_func_path": (None, "april generates one turn a sample: leave it out"),
    "data.max_images_per_prompt": (0, "april's prompts are text: leave it out"),
}
"""OpenRLHF flags that april does not support."""


SPELLING = "--april.{}"


def params_of(args: Any, settings: Settings) -> RolloutParams:
    """Return the rollout parameters: number of groups in flight and their staleness bound.

    Raises:
        ValueError: a flag is out of range.
    """
    return settings.params(
        args.rollout.batch_size,
        args.rollout.n_samples_per_prompt,
        {"rollout_batch_size": "--rollout.batch_size", "n_samples_per_prompt": "--rollout.n_samples_per_prompt"},
        SPELLING,
    )


def check_settings(args: Any, settings: Settings) -> None:
    """Check that april supports OpenRLHF's flags.

    Raises:
        ValueError: a flag is not supported, or is out of range.
    """
    refuse(UNSUPPORTED, lambda name, default: at(args, name, default), "--{} = {}")
    generated = getattr(args.rollout, "vllm_generate_batch_size", None) or args.rollout.batch_size
    if generated != args.rollout.batch_size:
        raise ValueError(
            f"--rollout.vllm_generate_batch_size = {generated}: april has its own (--april.over_sampling_batch_size); "
            "leave it out"
        )
    if args.algo.advantage.is_correction_level == "off":
        raise ValueError(
            "--algo.advantage.is_correction_level off: some tokens are of older policies, which only the correction "
            "accounts for: set it to token, or another"
        )
    params_of(args, settings)
