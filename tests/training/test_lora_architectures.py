"""Adapters on every architecture that the embedded engine serves: trained, served and stored policies are the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from april.config.settings.lora_settings import LoraSettings
from april.engines.embedded.model import ServedModel
from april.engines.pretrained import load_model
from april.training.lora import Adapters
from april.training.policy import save_policy
from tests import tiny

pytest.importorskip("peft")
IDS = torch.arange(5, 30)[None]

SHAPE: dict[str, Any] = {
    **{"vocab_size": 61, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "d_model": 32, "d_ff": 48, "ffn_dim": 48},
    **{"word_embed_proj_dim": 32, "decoder_layers": 2, "encoder_layers": 1, "decoder_ffn_dim": 48},
    **{"decoder_attention_heads": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
"""Settings by the names that configurations give them; each takes those that it knows."""
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SETTINGS = {
    "deepseek_v3": LATENT | {"q_lora_rank": 8, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT | {"q_lora_rank": 8},
}
SERVED = """
    afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe ctrl deepseek_v3 doge dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2
    gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 llama mellum minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral moshi nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma whisper
"""


def model(architecture: str) -> Any:
    config: Any = getattr(transformers, CONFIG_MAPPING_NAMES[architecture])
    torch.manual_seed(0)
    policy = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture])(
        config(**SHAPE | SETTINGS.get(architecture, {}))
    ).eval()
    stored = policy.state_dict()
    with torch.no_grad():
        for name, buffer in policy.named_buffers():
            if name in stored and buffer.is_floating_point():  # such as e_score_correction_bias, which starts at 0
                buffer.add_(torch.rand(buffer.shape) * 0.3)
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return policy


@torch.no_grad()
def logits(policy: Any) -> torch.Tensor:
    found: torch.Tensor = policy(input_ids=IDS, use_cache=False).logits[0]
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("architecture", SERVED.split())
def test_trained_adapters_are_served_and_stored(architecture: str, tmp_path: Path) -> None:
    policy = model(architecture)
    plain = logits(policy)
    adapters = Adapters(policy, LoraSettings(rank=2))
    served = ServedModel(adapters.merged_model())
    with torch.no_grad():
        for name, tensor in adapters.state_dict().items():
            if "lora_B" in name:
                tensor.normal_(std=0.1)
    trained = logits(policy)
    assert (trained - plain).abs().max() > 1e-3, "the adapters do something"
    served.load(adapters.merged())
    served.module.set_attn_implementation("eager")
    torch.testing.assert_close(logits(served.module), trained, atol=1e-4, rtol=1e-4)
    save_policy(tmp_path, policy, tiny.tokenizer(), adapters)
    torch.testing.assert_close(logits(load_model(str(tmp_path), torch.float32).eval()), trained, atol=1e-4, rtol=1e-4)
