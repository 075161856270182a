"""slime's settings: those that april reads, ignores and refuses."""

from __future__ import annotations

from typing import Any

from april.integrations.rules.rule import Rule, ValueOf, ignored, only, supported

FUNCTION = "custom-generate-function-path"


def _without_function(setting: str, value: Any, supported: str, reason: str) -> Rule:
    """Return the rule that generate functions need a value of a setting."""

    def holds(value_of: ValueOf) -> bool:
        return value_of(FUNCTION, None) is None or value_of(setting, value) == value

    return Rule(setting=setting, supported=supported, reason=reason, holds=holds, default=value)


def _images_alone(value_of: ValueOf) -> bool:
    keys = value_of("multimodal-keys", None)
    return keys is None or (set(keys) <= {"image"} and value_of(FUNCTION, None) is None)


RULES = (
    supported("rollout-batch-size", "number of groups in a batch (N)"),
    supported("n-samples-per-prompt", "number of samples in a group"),
    supported("over-sampling-batch-size", "number of groups in flight (N')"),
    supported("partial-rollout", "without it, rollouts are synchronous"),
    _without_function(
        "rollout-top-p",
        1.0,
        "all, but `1.0` only with a generate function",
        "the kept tokens are recorded, for which SGLang needs `return_sampling_mask`; generate functions do not get "
        "them: set it to 1",
    ),
    supported("rollout-stop-token-ids", "responses end with these tokens"),
    supported(
        "rollout-stop", "a response ends with the first token with which its text contains one, also across updates"
    ),
    supported(
        "custom-generate-function-path",
        "each call is an episode: april answers its `/generate` requests, and resumes interrupted responses",
    ),
    supported("dynamic-sampling-filter-path", "rejected groups are replaced"),
    _without_function(
        "mask-offpolicy-in-partial-rollout",
        False,
        "all, but not with a generate function",
        "a generate function makes the loss mask itself: leave it out",
    ),
    _without_function(
        "use-rollout-routing-replay",
        False,
        "all, but not with a generate function",
        "experts of each token by the version that drew the next one, across weight updates; generate "
        "functions do not get them: leave it out",
    ),
    Rule(
        setting="multimodal-keys",
        supported="`image` alone, and not with a generate function",
        reason="april sends images with each request, fresh or resumed; videos and audio are not sent, and generate "
        "functions get no images: leave them out",
        holds=_images_alone,
    ),
    only(
        "buffer-filter-path",
        None,
        "the buffer is april's, which resumes the oldest groups and keeps april_max_staleness: leave it out",
    ),
    ignored(
        "sglang-server-concurrency",
        512,
        "april sends requests for all groups in flight; --sglang-max-running-requests limits them. It applies to "
        "evaluation only",
    ),
    ignored(
        "use-distributed-post",
        False,
        "april reads the servers' streams in the rollout manager's process, where generate functions run too. It "
        "applies to evaluation only",
    ),
)
"""slime's flags, without the dashes in front, in the order of the page."""
