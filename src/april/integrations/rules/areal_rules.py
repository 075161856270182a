"""AReaL's settings: those that april reads and refuses."""

from __future__ import annotations

import os
import re

from april.integrations.rules.rule import Rule, ValueOf, only, supported

BACKEND = "rollout.backend"
REPLAY = "rollout.return_routed_experts"
ACTOR = "actor.backend"


def _one_rank(value_of: ValueOf) -> bool:
    """Whether AReaL's SPMD launcher starts at most one data-parallel rank. The single controller starts any number."""
    spmd = os.environ.get("AREAL_SPMD_MODE", "").lower() in ("1", "true")
    ranks = re.search(r"d(\d+)", str(value_of(ACTOR, "")).partition(":")[2])
    return not spmd or ranks is None or ranks[1] == "1"


def _separate(name: str, other: str) -> Rule:
    """Return the rule that a role does not share the GPUs of another one."""
    setting = f"{name}.scheduling_strategy.type"

    def holds(value_of: ValueOf) -> bool:
        kind = value_of(setting, None)
        target = value_of(f"{name}.scheduling_strategy.target", None)
        return getattr(kind, "value", kind) != "colocation" or target != other

    return Rule(
        setting=setting,
        supported=f"all but `colocation` with `{other}`",
        reason="april generates while AReaL trains; set it to separation",
        holds=holds,
    )


RULES = (
    supported("train_dataset.batch_size", "number of groups in a batch (N)"),
    supported("gconfig.n_samples", "number of samples in a group"),
    supported("rollout.max_head_offpolicyness", "staleness bound"),
    supported("dynamic_bs", "a rejected group is left out of its step, as in AReaL; without it, it is replaced"),
    only("rollout._version", "v1", "april has been run with v1: choose it"),
    Rule(
        setting=REPLAY,
        supported="all with SGLang",
        reason="`ModelResponse.routed_experts` has experts of the versions that drew the tokens; "
        "AReaL takes none of vLLM: set it to false",
        holds=lambda value_of: not (value_of(REPLAY, False) and str(value_of(BACKEND, "")).startswith("vllm")),
        default=False,
    ),
    supported(
        "gconfig.stop", "a response ends with the first token with which its text contains one, also across updates"
    ),
    only("gconfig.min_new_tokens", 0, "april does not forbid a response to end: leave it out"),
    only(
        "gconfig.frequency_penalty",
        0.0,
        "log-probabilities would not be those that tokens are drawn with: leave it out",
    ),
    only("gconfig.ignore_eos", False, "april's responses end with the model's end-of-sequence token: set it to false"),
    only("gconfig.use_beam_search", False, "a beam is no sample of the policy: set it to false"),
    supported(BACKEND, "SGLang and vLLM; vLLM with temperature 1 and without `top_p` and `top_k`"),
    supported("rollout.use_lora", "requests name the adapter of their version"),
    Rule(
        setting=ACTOR,
        supported="all under the single controller; one data-parallel rank (`d1`) under the SPMD launcher",
        reason="under AReaL's SPMD launcher april has been run with one rank: set d1, or start the script itself with "
        "scheduler.type=local",
        holds=_one_rank,
    ),
    _separate("actor", "rollout"),
    _separate("rollout", "actor"),
    Rule(
        setting="actor.recompute_logprob",
        supported="`false`, or all with `actor.use_decoupled_loss`",
        reason="it forgets the policies that tokens were drawn with; set it to false, or set actor.use_decoupled_loss",
        holds=lambda value_of: (
            not value_of("actor.recompute_logprob", False) or bool(value_of("actor.use_decoupled_loss", True))
        ),
    ),
)
"""AReaL's settings, in the order of the page."""
