"""OpenRLHF's settings: those that april reads and refuses."""

from __future__ import annotations

from april.integrations.rules.rule import Rule, ValueOf, ignored, only, supported

CORRECTION = "algo.advantage.is_correction_level"
GENERATED = "rollout.vllm_generate_batch_size"
BATCH = "rollout.batch_size"
RESPONSE = "rollout.max_new_tokens"
CONTEXT = "data.max_len"


def one_batch(value_of: ValueOf) -> bool:
    """Whether OpenRLHF generates a batch for each training step."""
    batch = value_of(BATCH, None)
    return bool((value_of(GENERATED, None) or batch) == batch)


def leaves_room(value_of: ValueOf) -> bool:
    """Whether a prompt of a token and the longest response fit OpenRLHF's limit of both."""
    longest, context = value_of(RESPONSE, None), value_of(CONTEXT, None)
    return not longest or context is None or bool(longest < context)


RULES = (
    supported(BATCH, "number of groups in a batch (N)"),
    supported("rollout.n_samples_per_prompt", "number of samples in a group"),
    supported("april.over_sampling_batch_size", "number of groups in flight (N'); default `auto`"),
    supported("april.max_staleness", "staleness bound; default 5"),
    supported("algo.dynamic_filtering_enable", "rejected groups are replaced"),
    supported("reward.remote_url", "a server or a Python file; a missing reward stops the run"),
    supported("train.async_enable", "generation continues while OpenRLHF trains; the staleness bound holds"),
    supported("train.partial_rollout_enable", "april's rollouts are partial with and without it"),
    supported("train.agent_func_path", "each executor is an episode, whose responses are resumed"),
    ignored("train.async_queue_size", 1, "--april.max_staleness bounds how far generation is ahead"),
    only("data.max_images_per_prompt", 0, "april's integration passes on no images: leave it out"),
    Rule(
        setting=GENERATED,
        supported=f"unset, or the value of `--{BATCH}`",
        reason="april has its own (--april.over_sampling_batch_size); leave it out",
        holds=one_batch,
    ),
    Rule(
        setting=RESPONSE,
        supported=f"unset, or less than `--{CONTEXT}`",
        reason=f"--{CONTEXT} limits prompt and response together; lower this, or raise --{CONTEXT}",
        holds=leaves_room,
    ),
    Rule(
        setting=CORRECTION,
        supported="all but `off`",
        reason="some tokens are of older policies, which only the correction accounts for: set it to token, or another",
        holds=lambda value_of: value_of(CORRECTION, None) != "off",
    ),
)
"""OpenRLHF's flags, without the dashes in front, in the order of the page."""
