"""Tiny mixtures of experts of three architectures, and the routes of a plain forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from april.engines.routers import RouteCapture
from april.rollout.trajectory.routes import Experts

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Moe": ("qwen3-moe", {"moe_intermediate_size": 16, "num_experts": 8, "norm_topk_prob": True}),
    "Mixtral": ("mixtral", {"num_local_experts": 8, "sliding_window": None}),
    "Glm4Moe": (
        "glm-4-moe",
        {
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
}
"""By the prefix of their classes: a name, and settings of their configuration."""


def mixture(architecture: str = "Qwen3Moe", seed: int = 0, sharpness: float = 8.0, **settings: Any) -> Any:
    """Return a policy of three layers, of which each token takes two of eight experts."""
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**shape | ARCHITECTURES[architecture][1] | settings)
    policy = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
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
