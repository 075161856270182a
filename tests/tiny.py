"""Policies small enough for a test: real architectures and real tokenizers, made from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

RECIPE = """
[model]
path = "policy"
[task]
kind = "reasoning_gym"
name = "gcd"
eval_size = 4
[rollout]
rollout_batch_size = 3
over_sampling_batch_size = 6
n_samples_per_prompt = 3
max_response_length = 48
max_staleness = 2
[engine]
max_num_seqs = 12
context_length = 256
[training]
steps = 6
threads = 1
[reporting]
output = "OUT"
"""
"""A run of seconds; its model is in the folder `policy`, its output in `run`."""

CHARACTERS = [chr(c) for c in range(32, 127)]

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Of all of them."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and the answer tags."""
    words = ["<pad>", "<eos>", "<unk>", "\n", *CHARACTERS, "<answer>", "</answer>"]
    core = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?answer>|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def model(seed: int = 0, sharpness: float = 4.0, **config: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.1M parameters; its weights are scaled up, since a random policy is too flat to catch mistakes."""
    torch.manual_seed(seed)
    policy = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **config}))
    sharpen(policy, sharpness)
    return policy


def mixture(seed: int = 0, sharpness: float = 4.0, **config: Any) -> Qwen3MoeForCausalLM:
    """The same as a mixture of four experts, of which a token takes two."""
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    policy = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **experts, **config}))
    sharpen(policy, sharpness)
    return policy


def sharpen(policy: Any, sharpness: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)


def save(directory: Path, **settings: Any) -> Path:
    """A model directory that transformers loads."""
    model(**settings).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def recipe(directory: Path, **added: str) -> Path:
    """`RECIPE` and its model, in `directory`; `added` are more lines by section."""
    save(directory / "policy")
    text = RECIPE.replace("OUT", str(directory / "run"))
    for section, lines in added.items():
        head = f"[{section}]\n"
        text = text.replace(head, head + lines) if head in text else text + head + lines
    path = directory / "recipe.toml"
    path.write_text(text)
    return path
