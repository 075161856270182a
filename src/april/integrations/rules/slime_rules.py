"""slime's settings: those that april reads, ignores and refuses."""

from __future__ import annotations

from april.integrations.rules.rule import ignored, only, supported

RULES = (
    supported("rollout-batch-size", "number of groups in a batch (N)"),
    supported("n-samples-per-prompt", "number of samples in a group"),
    supported("over-sampling-batch-size", "number of groups in flight (N')"),
    supported("partial-rollout", "without it, rollouts are synchronous"),
    supported("rollout-top-p", "the kept tokens are recorded; needs an SGLang with `return_sampling_mask`"),
    supported("rollout-stop-token-ids", "responses end with these tokens"),
    supported("dynamic-sampling-filter-path", "rejected groups are replaced"),
    only("rollout-stop", None, "april stops at token ids and never looks at text: use --rollout-stop-token-ids"),
    only("custom-generate-function-path", None, "april generates itself, one turn a sample: leave it out"),
    only("use-rollout-routing-replay", False, "april does not record routed experts: leave it out"),
    only("multimodal-keys", None, "april's prompts are text: leave it out"),
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
        "april reads the servers' streams in the rollout manager's process. It applies to evaluation only",
    ),
)
"""slime's flags, without the dashes in front, in the order of the page."""
