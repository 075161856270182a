"""Tiny policies made from a configuration, and the log-probabilities of sampled tokens in their forward passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample
from tests import tiny

VOCABULARY = 512


def tiny_model(path: Path, seed: int, layers: int = 2) -> Path:
    """A narrow Qwen3 in float32, its weights sharpened: a fresh one is too flat to show errors."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def tiny_eagle(path: Path, policy: Path) -> Path:
    """An untrained EAGLE-3 head for a `tiny_model`: it reads three layers' hidden states, and guesses."""
    target = load_file(policy / "model.safetensors")
    head, embeddings = target["lm_head.weight"], target["model.embed_tokens.weight"]
    config = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
    )
    config.draft_vocab_size = VOCABULARY
    config.save_pretrained(path)
    shapes = {"fc": (64, 192), "midlayer.self_attn.o_proj": (64, 64), "midlayer.mlp.down_proj": (64, 128)}
    shapes |= {f"midlayer.self_attn.{name}_proj": (size, 128) for name, size in (("q", 64), ("k", 32), ("v", 32))}
    shapes |= {f"midlayer.mlp.{name}_proj": (128, 64) for name in ("gate", "up")}
    torch.manual_seed(7)
    weights = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {name: torch.ones(64) for name in norms}
    weights |= {"lm_head": head, "embed_tokens": embeddings}
    save_file({f"{name}.weight": value for name, value in weights.items()}, path / "model.safetensors")
    return path


class Oracle:
    """A policy's forward pass with Hugging Face, in float32; `joint` as of `drawn_from`."""

    def __init__(self, path: Path, joint: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.joint = joint

    def logprobs(self, sample: Sample, slack: float = 0.0) -> NDArray[np.float32]:
        """Log-probability of each response token under the distribution it was to be drawn from, shape [length].

        `slack` moves the limits of min-p and top-p by this share: a token that stands on a limit is in by one rounding
        of its logit and out by another.
        """
        response = sample.response_ids
        with torch.no_grad():
            logits = self.model(torch.tensor([[*sample.prompt_ids, *response]])).logits[0]
        rows = logits[len(sample.prompt_ids) - 1 : -1]
        given = sample.sampling
        top_p = given.top_p * (1 + slack) if given.top_p < 1 else 1.0
        drawn = drawn_from(rows, replace(given, min_p=given.min_p * (1 + slack), top_p=top_p), self.joint)
        return drawn[torch.arange(len(response)), torch.tensor(response)].numpy()


def drawn_from(logits: Tensor, sampling: SamplingParams, joint: bool) -> Tensor:
    """Log-probabilities of the distribution that `sampling` draws from, shape of `logits` [positions, vocabulary].

    `joint`: every truncation is of the whole distribution (SGLang); otherwise min-p is, and top-p is of what min-p and
    top-k leave (vLLM).
    """
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    whole = logits.softmax(-1)
    kept = whole >= sampling.min_p * whole.amax(-1, keepdim=True)
    if sampling.top_k:
        kept &= logits >= logits.topk(sampling.top_k).values[..., -1:]
    if sampling.top_p < 1:
        ranked, order = (whole if joint else logits.masked_fill(~kept, -torch.inf).softmax(-1)).sort(descending=True)
        nucleus = ranked.cumsum(-1) - ranked < sampling.top_p
        kept &= torch.zeros_like(nucleus).scatter(-1, order, nucleus)
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
