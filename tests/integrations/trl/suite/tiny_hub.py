"""Tiny local models and data sets, under the names on the Hugging Face hub that TRL's tests load.

Models lie in a folder as the hub's cache keeps them, so nothing is patched to load them, and nothing can be fetched.
They have the shapes of TRL's own tiny models, with a smaller vocabulary and one tokenizer. Data sets come from the
scripts of the TRL checkout that made the hub's. Processors have no part for videos, which needs torchvision.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset, DatasetDict, IterableDatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ORGANIZATION = "trl-internal-testing"
COMMIT = "0" * 40
VOCABULARY = 32768
"""Large, because a test of TRL wants that no completion of eight random tokens ends."""
IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE_TOKENS]
PIECES: dict[int, str] = {
    151643: "<|endoftext|>",
    151645: "<|im_end|>",
    151657: "<tool_call>",
    151658: "</tool_call>",
    **{0: "!", 11: ",", 16: "1", 17: "2", 18: "3", 19: "4", 25: ":", 27: "<", 29: ">", 40: "I"},
    **{64: "a", 65: "b", 66: "c", 198: "\n", 220: " ", 293: " b", 314: " {", 330: ' "', 397: ">\n"},
    **{411: "out", 450: "de", 497: '",', 522: "</", 606: "name", 788: '":', 894: " any", 927: "sh", 944: "'t"},
    **{1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"', 5212: ' {"', 5392: " tool"},
    **{6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n", 13477: "crement", 14172: "tool"},
    **{16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment"},
    **{64648: "multiply", 93054: "_multiply", 95642: '"}}\n'},
}
"""Texts of tokens of Qwen's that replace `model.generate` in tests of TRL."""
WORDS = [
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
    "assistant",
    " got an unexpected keyword argument",
]
WORDS += [piece for piece in PIECES.values() if len(piece) > 1 and piece not in SPECIAL]
"""Words that tests of TRL contain. As single tokens, they fit the limits of these tests."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
TEXT: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 24,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [1, 1, 1]},
}
"""Text layers of models that read images."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", {"logit_scale": 1.0}),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", {"head_dim": 2}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4MoeForCausalLM",
        {**ROUTED, "head_dim": 2, "attention_bias": True, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    ),
    "tiny-GptOssForCausalLM": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", {}),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", {"num_labels": 1}),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", {}),
    "tiny-NemotronHForCausalLM-nano": (
        "NemotronHForCausalLM",
        {
            **ROUTED,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "mamba_n_groups": 1,
            "ssm_state_size": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2ForSequenceClassification", {"num_labels": 1}),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", {"head_dim": 128}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3ForSequenceClassification", {"num_labels": 1, "head_dim": 128}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 128}),
}
"""The class of each model, and its configuration in addition to `SHAPE`."""
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLForConditionalGeneration",
        {"depth": 2, "hidden_size": 16, "num_heads": 4, "fullatt_block_indexes": [1], "out_hidden_size": 24},
    ),
    "tiny-Qwen2VLForConditionalGeneration": (
        "Qwen2VLForConditionalGeneration",
        {"depth": 2, "hidden_size": 24, "num_heads": 4, "embed_dim": 64},
    ),
}
"""The class of each model that reads images, and the configuration of its vision tower."""
REMOTE = "tiny-RemoteForCausalLM"
"""A model with code of its own, which comes from the checkout."""


def tokenizer(
    template: str, size: int = VOCABULARY, own: Sequence[str] = WORDS
) -> transformers.PreTrainedTokenizerFast:
    """A token per byte, and one for each text in `own`. The remaining tokens are words that only a random model writes.

    Args:
        template: file of a chat template in TRL's package.
        size: number of tokens.
    """
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number}" for number in range(size - len(bytes_) - len(SPECIAL) - len(own))]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *own, *bytes_, *words])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in own])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / template).read_text()
    return made


def token_of(qwen: int) -> int:
    """Return the token that stands for one of Qwen's: one with its text if that is known, and otherwise a word."""
    if qwen in PIECES:
        (token,) = _words().encode(PIECES[qwen])
        return token
    return _words().convert_tokens_to_ids(f"w{qwen}")


@functools.cache
def _words() -> transformers.PreTrainedTokenizerFast:
    return tokenizer("qwen3.jinja")


class ImageTextProcessor(transformers.Qwen2_5_VLProcessor):
    """The processor of Qwen's models for images and text."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = map(SPECIAL.index, (self.image_token, self.video_token))
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _image_ids() -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: SPECIAL.index(token) for name, token in zip(names, IMAGE_TOKENS, strict=True)}


def make_models(cache: Path, checkout: Path) -> None:
    """Fill `cache` with every model, as the cache of the hub."""
    tokenizers = {name: tokenizer(name) for name in ("qwen2_5.jinja", "qwen3.jinja")}
    for number, (name, (architecture, shape)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        kind = getattr(transformers, architecture)
        folder = _repository(cache, name)
        _save(kind(kind.config_class(**{**SHAPE, **shape})), folder)
        tokenizers["qwen3.jinja" if "Qwen3" in name else "qwen2_5.jinja"].save_pretrained(folder)
    words = tokenizer("qwen2_5_vl.jinja")
    for name, (architecture, tower) in VISION.items():
        kind = getattr(transformers, architecture)
        folder = _repository(cache, name)
        _save(kind(kind.config_class(text_config=TEXT, vision_config=tower, **_image_ids())), folder)
        ImageTextProcessor(Qwen2VLImageProcessorPil(), words, words.chat_template).save_pretrained(folder)
        transformers.AutoProcessor.register(kind.config_class, ImageTextProcessor, exist_ok=True)
    _make_remote(_repository(cache, REMOTE), checkout, tokenizers["qwen2_5.jinja"])


def _repository(cache: Path, name: str) -> Path:
    """The folder in `cache` of the only commit of a model."""
    root = cache / f"models--{ORGANIZATION}--{name}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def _save(model: Any, folder: Path) -> None:
    """Save `model` with weights as of TRL's tiny models, which are large enough that a step changes each of them."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    model.to(torch.bfloat16).save_pretrained(folder)


def _make_remote(folder: Path, checkout: Path, words: transformers.PreTrainedTokenizerFast) -> None:
    shape = {**SHAPE, "tie_word_embeddings": False}
    _save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_remote.RemoteConfig",
            "AutoModel": "modeling_remote.RemoteModel",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    for code in (checkout / "scripts" / "generate_tiny_models" / "for_causal_lm" / "_remote_code").glob("*_remote.py"):
        shutil.copy(code, folder)
    words.save_pretrained(folder)


def data_sets(checkout: Path) -> dict[tuple[str, str], DatasetDict]:
    """Return the data sets of TRL's tests by name and configuration, as the checkout's script makes them."""
    made: dict[tuple[str, str], Any] = {}

    def keep(parts: Any, repo_id: str, config_name: str = "default", **_: Any) -> None:
        made[repo_id, config_name] = parts

    np.random.seed(0)  # of the pixels
    with mock.patch.object(Dataset, "push_to_hub", keep), mock.patch.object(DatasetDict, "push_to_hub", keep):
        for name in ("zen", "zen-image", "zen-multi-image"):
            script = _script(checkout / "scripts" / f"generate_{name.replace('-', '_')}_dataset.py")
            script.main(test_size=0.1, push_to_hub=True, repo_id=f"{ORGANIZATION}/{name}")
    return {key: parts for key, parts in made.items() if isinstance(parts, DatasetDict)}


def _script(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


class Loader:
    """Takes the place of `datasets.load_dataset`.

    Args:
        known: data sets by name and configuration.
        rows: maximum number of rows of each part; None gives all.
    """

    def __init__(self, known: dict[tuple[str, str], DatasetDict], rows: int | None = None) -> None:
        self.known = known
        self.rows = rows

    def __call__(self, path: str, name: str = "default", *, split: str | None = None, streaming: bool = False) -> Any:
        if (path, name) not in self.known:
            raise FileNotFoundError(f"{path} ({name}): there is no local data set for it; see tiny_hub.py")
        parts: Any = self.known[path, name]
        if self.rows is not None:
            parts = DatasetDict({key: part.select(range(min(self.rows, len(part)))) for key, part in parts.items()})
        if streaming:
            parts = IterableDatasetDict({key: part.to_iterable_dataset() for key, part in parts.items()})
        return parts if split is None else parts[split]
