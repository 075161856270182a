"""Tiny mixtures of experts of three architectures, and the routes of a plain forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from april.engines.routers import RouteCapture
from april.rollout.trajectory.routes import Experts
from tests.engines.architectures import SHAPE, sharpen

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 8, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 8, "sliding_window": None},
    "Glm4Moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
}
"""Settings of their configurations, by the prefix of their classes."""


def mixture(architecture: str = "Qwen3Moe", seed: int = 0, sharpness: float = 8.0, **settings: Any) -> Any:
    """Return a policy of three layers, of which each token takes two of eight experts."""
    shape = {**SHAPE, "num_experts_per_tok": 2}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**shape | ARCHITECTURES[architecture] | settings)
    policy = getattr(transformers, f"{architecture}ForCausalLM")(config)
    sharpen(policy, sharpness)
    return policy.eval()


@torch.no_grad()
def routes(policy: Any, ids: list[int]) -> Experts:
    """Return the routes of each token, [tokens, layers, top k], of a plain forward pass."""
    capture = RouteCapture(policy)
    try:
        policy(input_ids=torch.tensor([ids]), use_cache=False)
        experts: Experts = capture.take()
    finally:
        capture.remove()
    return experts


def as_sets(experts: Experts) -> Any:
    """Return routes without the order of a token's experts, which changes nothing."""
    return np.sort(experts, -1)
