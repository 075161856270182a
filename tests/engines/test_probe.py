"""No model is served or packed whose own attention computes anything else, in whatever type and beyond its windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from april.engines.embedded import EmbeddedEngine
from april.engines.embedded.probe import in_float32
from april.training.forward import check_head
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.packing import can_pack
from tests.engines import architectures
from tests.training.steps import recipe

SHAPE: dict[str, Any] = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
DECODER = SHAPE | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MADE_FOR_TRANSLATION = SHAPE | {
    "d_model": 32,
    "num_hidden_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}


def made(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{name}ForCausalLM")
    return model(model.config_class(**settings)).eval()


def gpt_oss() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return made("GptOss", **DECODER, **experts, rope_parameters=rope, sliding_window=1000)


@pytest.mark.parametrize("name", ["Bart", "MBart", "Marian", "Pegasus", "BlenderbotSmall"])
def test_a_model_that_ignores_positions_is_neither_served_nor_packed(name: str) -> None:
    model = made(name, **MADE_FOR_TRANSLATION)
    with pytest.raises(ValueError, match="logits differ from its own attention's"):
        EmbeddedEngine(model, kv_cache_bytes=1 << 24)
    assert not can_pack(model)


@pytest.mark.parametrize("name", ["Phimoe", "Doge"])
def test_a_window_that_attention_ignores_bounds_the_context(name: str) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if name == "Phimoe" else {}
    model = made(name, **DECODER, **experts, sliding_window=14, max_position_embeddings=64)
    with pytest.raises(ValueError, match="pass context_length=14"):
        EmbeddedEngine(model, kv_cache_bytes=1 << 24)
    EmbeddedEngine(model, kv_cache_bytes=1 << 24, context_length=14)
    assert not can_pack(model)
    assert model.config.sliding_window == 14, "the window is as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sinks_are_refused_by_name(dtype: torch.dtype) -> None:
    model = gpt_oss().to(dtype)
    with pytest.raises(ValueError, match="its attention takes s_aux, which april's attention does not support"):
        EmbeddedEngine(model, kv_cache_bytes=1 << 24)
    assert not can_pack(model)


@pytest.mark.parametrize("architecture", ["qwen3-moe", "gemma3", "mistral-window"])
def test_a_model_in_bfloat16_is_compared_in_float32_and_restored(architecture: str) -> None:
    model = architectures.model(architecture).bfloat16()
    before = dict(model.named_parameters())
    with in_float32(model):
        assert model(input_ids=torch.arange(9)[None]).logits.dtype == torch.float32
    check_head(model)
    assert can_pack(model)
    EmbeddedEngine(model, kv_cache_bytes=1 << 24)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and parameter.dtype == torch.bfloat16 for name, parameter in before.items())
    assert model(input_ids=torch.arange(9)[None]).logits.dtype == torch.bfloat16


def test_a_copy_in_bfloat16_keeps_exact_rotary_frequencies() -> None:
    """As a model that is loaded in bfloat16 does: rounded to 8 bits, they would misplace distant tokens."""
    model = architectures.model("qwen3")
    served = EmbeddedEngine(model, kv_cache_bytes=1 << 24, dtype=torch.bfloat16)._model.module
    assert torch.equal(served.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert {parameter.dtype for parameter in served.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_llama_4_text_is_trained_padded() -> None:
    """Its attention functions are not passed the chunk size, and its trunk has an unusual name."""
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 512}
    model = made("Llama4", **DECODER, **experts)
    check_head(model)
    assert not can_pack(model)
    assert model.config.attention_chunk_size == 512
    with pytest.raises(ValueError, match="layer 0 is of type 'chunked_attention'"):
        EmbeddedEngine(model, kv_cache_bytes=1 << 24)


def test_the_context_of_a_multimodal_model_is_that_of_its_text() -> None:
    """Its configuration states the number one level down."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=DECODER | {"max_position_embeddings": 77},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    assert not hasattr(config, "max_position_embeddings")
    assert LocalLearner(model, LearnerSettings.of(recipe())).context_length == 77
    assert EmbeddedEngine(model, kv_cache_bytes=1 << 24).capacity.context_length == 77
