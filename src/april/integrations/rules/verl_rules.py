"""verl's settings: those that april reads, ignores and refuses."""

from __future__ import annotations

from april.integrations.rules.rule import Rule, ignored, only, supported

PACKAGE = "april.integrations.verl"
SAMPLER = {"path": f"pkg://{PACKAGE}", "name": "AprilReplayBuffer"}
MANAGER = f"{PACKAGE}.AprilRolloutManager"

STALENESS = "trainer.v1.april.max_staleness is the bound, and no sample is dropped for it"
OWN = "april brings its own: leave it out"
ROLLOUT = "actor_rollout_ref.rollout"

REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay"

IMAGES = Rule(
    setting="data.image_key",
    supported="images of Qwen-VL models, with vLLM; in agent loops those of the prompt",
    reason="april hands over images with vLLM, of models whose image processor is a Qwen2VLImageProcessor: verl "
    "reduces no other placeholders to one for each image, and none for SGLang, which then tokenizes the text of a "
    "resumed sample again; leave other images, videos and audio out of the data; checked for each prompt",
)
"""Needs the data: checked for each prompt."""

RULES = (
    supported("data.train_batch_size", "number of groups in a batch (N)"),
    supported(f"{ROLLOUT}.n", "number of samples in a group"),
    supported("trainer.v1.april.over_sampling_batch_size", "number of groups in flight (N'); default 2 N, or `auto`"),
    supported("trainer.v1.april.max_staleness", "staleness bound; default 5"),
    supported("algorithm.filter_groups", "rejected groups are replaced; not with a colocated reward model"),
    supported(f"{ROLLOUT}.agent.default_agent_loop", "each loop is an episode"),
    Rule(
        setting="algorithm.adv_estimator",
        supported="all but `remax`",
        reason="verl's V1 trainer makes no greedy baselines, only its older RayPPOTrainer.fit does: choose another "
        "estimator",
        holds=lambda value_of: value_of("algorithm.adv_estimator", None) != "remax",
    ),
    supported(REPLAY, "experts by the version that drew the next token, across weight updates; not with agent loops"),
    only(
        f"{ROLLOUT}.disaggregation.enabled",
        False,
        "prefill and decode on separate servers are not supported: set it to false",
    ),
    only(f"{ROLLOUT}.agent.agent_loop_manager_class", MANAGER, OWN, supported="unset"),
    only("trainer.v1.sampler.custom_sampler.name", SAMPLER["name"], OWN, supported="unset"),
    only(
        "trainer.v1.april.parameter_sync_step",
        1,
        "the replicas sleep while the policy is trained, so its weights go to them after every step: leave it out; "
        "for several updates a step, set actor_rollout_ref.actor.ppo_mini_batch_size",
    ),
    ignored("trainer.v1.sampler.max_off_policy_threshold", 8, STALENESS),
    ignored("trainer.v1.sampler.max_off_policy_strategy", "drop", STALENESS),
    IMAGES,
)
"""verl's settings, in the order of the page."""
