"""SkyRL's settings: those that april reads and refuses."""

from __future__ import annotations

from april.integrations.rules.rule import Rule, ValueOf, only, supported

ENGINE = "generator.inference_engine"
REPLAY = f"{ENGINE}.enable_return_routed_experts"
SAMPLING = "generator.sampling_params"
ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
MODE = f"{ENGINE}.engine_init_kwargs.logprobs_mode"

LOSSES = ("rollout_is", "dppo")
"""Losses that read the log-probabilities of rollouts in place of the trainer's."""


def _as_drawn(value_of: ValueOf) -> bool:
    """Whether vLLM reports the log-probabilities with which tokens were drawn."""
    unchanged = {"temperature": 1, "top_p": 1, "min_p": 0}
    plain = all((value_of(f"{SAMPLING}.{name}", value) or 0) == value for name, value in unchanged.items())
    plain = plain and value_of(f"{SAMPLING}.top_k", -1) <= 0
    return plain or bool(value_of(MODE, None) == "processed_logprobs")


def _corrected(value_of: ValueOf) -> bool:
    """Whether the loss accounts for tokens of older policies."""

    def is_set(name: str) -> bool:
        return value_of(f"{CORRECTION}.{name}", None) is not None

    if is_set("tis_ratio_type") or is_set("sequence_mask_metric"):
        return True  # SkyRL requests log-probabilities if `logprobs` is unset
    loss = value_of(f"{ALGORITHM}.policy_loss_type", "regular")
    anchored = loss == "cispo" and value_of(f"{ALGORITHM}.cispo.cispo_anchor", None) == "rollout"
    outliers = is_set("outlier_token_is_threshold_low") or is_set("outlier_token_is_threshold_high")
    masked = is_set("token_mask_is_threshold_low") and is_set("token_mask_is_threshold_high")
    reads = outliers or masked or anchored or loss in LOSSES
    return reads and value_of(f"{SAMPLING}.logprobs", 1) is not None


RULES = (
    supported("trainer.train_batch_size", "number of groups in a batch (N)"),
    supported("generator.n_samples_per_prompt", "number of samples in a group"),
    supported("april.over_sampling_batch_size", "number of groups in flight (N'); default `auto`"),
    supported("april.max_staleness", "staleness bound; default 5"),
    supported(
        "trainer.fully_async.enabled",
        "generation continues during training; `num_parallel_generation_workers` and `max_staleness_steps` are the "
        "defaults of N' and of the bound, which is kept",
    ),
    supported("generator.batched", "SkyRL's batched generation; with it, `generator.max_turns` must be 1"),
    supported("generator.max_turns", "SkyRL's agent loop drives each sample; its turns are interrupted and resumed"),
    supported("generator.step_wise_trajectories", "one sequence for each turn, as SkyRL's generator returns them"),
    supported(
        f"{SAMPLING}.stop", "a turn ends with the first token with which its text contains one, also across updates"
    ),
    supported(f"{SAMPLING}.logprobs", "SkyRL sets it to 1 for a correction; a loss without one needs it"),
    supported(f"{ALGORITHM}.dynamic_sampling.type", "with `filter`, rejected groups are replaced"),
    supported("trainer.policy.model.lora.rank", "requests name the adapter that SkyRL loads into its servers"),
    only("trainer.fully_async.simulate_training", False, "april generates for a real trainer: leave it out"),
    only(
        "trainer.fully_async.sample_full_batch",
        False,
        "april does not drop groups of equal rewards in this trainer: set it to false",
    ),
    only("generator.vision_language_generator", False, "april's integration passes on no images: leave it out"),
    only(
        "generator.chat_template.name_or_path",
        None,
        "it renders responses again, which loses log-probabilities: leave it out",
    ),
    only(f"{SAMPLING}.additional_kwargs", None, "april does not know what they mean: leave it out"),
    only(f"{ENGINE}.backend", "vllm", "april has been run with vllm: choose it"),
    only(f"{ENGINE}.enable_pd", False, "prefill and decode on separate servers are not supported: set it to false"),
    supported(REPLAY, "experts of each token by the version that drew the next one, across weight updates"),
    only(
        f"{ENGINE}.enable_return_sample_support_set",
        False,
        "april does not record which tokens top-k kept: set it to false",
    ),
    Rule(
        setting=MODE,
        supported="`processed_logprobs`, or all if temperature, top_p, top_k and min_p change nothing",
        reason="with a temperature, top_p, top_k or min_p, vLLM reports log-probabilities that tokens were not drawn "
        "with; set it to processed_logprobs",
        holds=_as_drawn,
    ),
    Rule(
        setting=f"{CORRECTION}.tis_ratio_type",
        supported="all but unset; all with another correction, or with `logprobs` and a loss that reads them",
        reason="some tokens are of older policies, which only the correction accounts for; set it to token, or another",
        holds=_corrected,
    ),
)
"""SkyRL's settings, in the order of the page."""
