"""A random Qwen3 whose heads are large enough for the CPU builds of vLLM and SGLang, for timings."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def small_policy(vocab_size: int, context_length: int, layers: int, tied: bool) -> Qwen3ForCausalLM:
    """Return the policy; `tied`: its head shares the parameters of its embeddings."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=context_length,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
