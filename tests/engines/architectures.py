"""Tiny models of many architectures, and the log-probabilities of a plain forward pass."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from april.engines.embedded import EmbeddedEngine
from april.rollout.engine import Chunk
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample

SUPPORTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-tied": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 14}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 14, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 14}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": 14}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 3.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
}

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Configuration of every model, unless its own differs."""
DEVICE = os.environ.get("APRIL_TEST_DEVICE", "cpu")
"""Where the models of these tests are; `benchmarks/gpu.py` runs them on a GPU."""


def model(architecture: str = "qwen3", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Three layers, grouped heads, weights sharp enough that no distribution is flat."""
    config_class, model_class, own = SUPPORTED[architecture]
    torch.manual_seed(seed)
    policy = getattr(transformers, model_class)(getattr(transformers, config_class)(**SHAPE | own | settings))
    sharpen(policy, 10)
    return policy.eval().to(DEVICE)


def sharpen(policy: PreTrainedModel, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)


@torch.no_grad()
def perturb(policy: PreTrainedModel, seed: int) -> None:
    """Change the weights in place, as an optimiser does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter += 0.1 * parameter.std() * noise


@torch.no_grad()
def reference(policy: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Log-probabilities [length] of the response under a plain forward pass; no top-k, top-p or min-p."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=DEVICE)
    logits = policy(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return pick(logits, sample.response_ids, sample.sampling.temperature)


def pick(logits: torch.Tensor, tokens: list[int], temperature: float) -> torch.Tensor:
    scaled = logits / temperature if temperature else logits
    return scaled.cpu().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def cached(policy: PreTrainedModel, sample: Sample, tokens: int) -> DynamicCache:
    """Keys and values of the first `tokens` tokens of the sample under the policy's present weights."""
    cache = DynamicCache(config=policy.config)
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids][:tokens]], device=DEVICE)
    policy(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def continuation(policy: PreTrainedModel, sample: Sample, cache: DynamicCache) -> torch.Tensor:
    """Log-probabilities of the response tokens whose distributions `policy` computes after what `cache` holds."""
    held = cache.get_seq_length()
    ids = [*sample.prompt_ids, *sample.response_ids]
    given = torch.tensor([ids[held:-1]], device=DEVICE)
    logits = policy(input_ids=given, past_key_values=cache, use_cache=True).logits[0]
    return pick(logits, ids[held + 1 :], sample.sampling.temperature)


def samples(
    groups: int = 3, size: int = 3, max_tokens: int = 24, prompt: int = 4, seed: int = 7, **sampling: Any
) -> list[Sample]:
    """Groups whose prompts grow longer, each with its own budget, so that nothing is aligned."""
    made = []
    for i in range(groups):
        ids = tuple((3 * i + 5 * j) % VOCABULARY for j in range(prompt + 5 * i))
        params = SamplingParams(max_tokens=max_tokens + 7 * i, **sampling)
        made += Group.start(i, Prompt(ids), size, params, seed).samples
    return made


def append(sample_list: Iterable[Sample], chunks: Iterable[Chunk]) -> None:
    by_id = {sample.id: sample for sample in sample_list}
    for chunk in chunks:
        assert chunk.error is None
        by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)


async def run(engine: EmbeddedEngine, sample_list: list[Sample]) -> list[Sample]:
    """Submit all and poll to the end."""
    for sample in sample_list:
        engine.submit(sample)
    while chunks := await engine.poll():
        append(sample_list, chunks)
    assert all(sample.finish is not None for sample in sample_list)
    return sample_list


def responses(sample_list: Iterable[Sample]) -> dict[str, list[int]]:
    return {sample.id: sample.response_ids for sample in sample_list}


def assert_behaviour(policy: PreTrainedModel, sample_list: Iterable[Sample], tolerance: float = 1e-4) -> None:
    """The recorded log-probabilities match a plain forward pass."""
    for sample in sample_list:
        error = (reference(policy, sample) - torch.from_numpy(sample.logprobs)).abs().max()
        assert error < tolerance, f"sample {sample.id}: {error}"
