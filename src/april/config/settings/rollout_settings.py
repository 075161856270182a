"""Settings of rollouts: batch sizes, staleness, sampling and rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from april.config.ranges import (
    Gigabytes,
    NotNegative,
    Positive,
    ProcessesOrNone,
    Seconds,
)
from april.rollout.params import MAX_STALENESS


@dataclass(kw_only=True)
class RolloutSettings:
    """How responses are generated.

    Args:
        partial_rollout: Active partial rollouts: start more groups than a step needs, interrupt the rest once enough
            are complete, and resume those first in the next step. Off: synchronous generation, every sample on-policy.
        policy: april, or the reference implementation's policy for comparisons (april-paper): fixed N', no staleness
            bound, batches of the groups that complete first.
        rollout_batch_size: Groups in a training step (N).
        over_sampling_batch_size: Groups in flight at the start of a step (N'), from N to N × (max_staleness + 1). With
            trainer.overlap, a group also starts whenever one is ready, unless training is slower than generation. auto:
            the smallest number whose forecast throughput is within 2 % of the best that the staleness bound allows,
            recomputed as lengths and speeds change.
        n_samples_per_prompt: Samples in a group (G).
        max_staleness: Staleness bound: the maximum number of weight updates between a group's first token and the step
            that trains on it.
        ramp_steps: Steps over which N' grows from N to its value. The first step is then synchronous, so that the
            policy is not first trained on short responses alone. 0: no ramp.
        admission_window: Hold back a complete group while more than this many groups started after the oldest
            unfinished group and before it, so that short responses are not trained on before long ones. Unset: no group
            is held back.
        max_prompt_length: Leave out prompts with more tokens than this. Unset: the context length minus
            max_response_length.
        max_response_length: Response budget of a sample, in tokens.
        temperature: Sampling temperature.
        top_p: Nucleus sampling; 1 turns it off. Under truncated sampling the trainer renormalises its distribution over
            the same set of tokens.
        top_k: Sample from the k most probable tokens; 0 turns it off.
        min_p: Sample from tokens whose probability is at least this share of the largest; 0 turns it off.
        stop_token_ids: Tokens that end a response, in addition to the model's end-of-sequence tokens.
        stop: Texts that end a response or a turn: with the token that completes the first of them. They count as
            sampled tokens and are trained on; special tokens and thinking are part of the text.
        dynamic_sampling: Replace groups whose rewards are all equal, one for one. Unset: the algorithm's published
            choice.
        max_rejected_groups: Maximum number of groups that dynamic sampling rejects in one step before the run stops;
            unset: 20 N.
        outage_limit: Maximum duration in seconds of an engine outage (no request succeeds). No sample is given up
            during an outage; after this time the run stops and can be resumed.
        on_reward_error: Action when a reward function fails: stop the run (raise), score the sample 0 (zero), or leave
            out its group (reject).
        reward_timeout: Time limit of one reward, in seconds.
        reward_workers: Maximum number of processes that compute rewards during generation. One starts with the run,
            further ones start while rewards wait. Unset: slightly more than the number of CPU cores. 0: threads of the
            run's own process, for fast functions that cannot hang, because a hung thread cannot be stopped.
        reward_memory_gb: Memory limit of a reward process in GB, in addition to its memory after loading (Linux only);
            unset: no limit.
        reward_env: Environment variables that reward processes get although their names look like secrets. All other
            such variables are removed.
    """

    partial_rollout: bool = True
    policy: Literal["april", "april-paper"] = "april"
    rollout_batch_size: Positive[int] = 32
    over_sampling_batch_size: Positive[int] | Literal["auto"] = "auto"
    n_samples_per_prompt: Positive[int] = 8
    max_staleness: NotNegative[int] = MAX_STALENESS
    ramp_steps: NotNegative[int] = 0
    admission_window: Positive[int] | None = None
    max_prompt_length: Positive[int] | None = None
    max_response_length: Positive[int] = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[NotNegative[int], ...] = ()
    stop: tuple[str, ...] = ()
    dynamic_sampling: bool | None = None
    max_rejected_groups: Positive[int] | None = None
    outage_limit: Seconds = 600.0
    on_reward_error: Literal["raise", "zero", "reject"] = "raise"
    reward_timeout: Seconds | None = 30.0
    reward_workers: ProcessesOrNone | None = None
    reward_memory_gb: Gigabytes | None = 4.0
    reward_env: tuple[str, ...] = ()
