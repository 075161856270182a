"""Tiny policies that read images: real architectures, a real image processor, a tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from april.images.store import ImageStore
from tests.tiny import sharpen

WORDS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHARACTERS = [chr(code) for code in range(32, 127)]
VOCABULARY = ["<pad>", "<unk>", "\n", *WORDS, *CHARACTERS]
TOKEN = {word: id for id, word in enumerate(VOCABULARY)}
PLACEHOLDER = TOKEN["<|image_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the templates of Qwen's models write conversations."""
PATCH = 4
"""Pixels of a patch, of which 2 x 2 make an embedding."""

TEXT: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]},
    "bos_token_id": None,
    "eos_token_id": TOKEN["<|im_end|>"],
}
SERVED: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Changes for servers, whose attention on CPUs has no heads of 8 dimensions. The layers make a policy slow enough to be
interrupted."""
IDS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": TOKEN["<|video_pad|>"],
    "vision_start_token_id": TOKEN["<|vision_start|>"],
    "vision_end_token_id": TOKEN["<|vision_end|>"],
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": PATCH,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3VL": {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    "Qwen2_5_VL": {**VISION, "window_size": 16, "fullatt_block_indexes": [1]},
}
"""Settings of the parts that compute images, by the prefix of the models' classes."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and the words of the chat template."""
    core = Tokenizer(models.WordLevel(TOKEN, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\|\w+\|>|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=[word for word in WORDS if word != "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def model(
    architecture: str = "Qwen3VL", seed: int = 0, sharpness: float = 4.0, patch: int = PATCH, **changes: Any
) -> Any:
    """A policy whose weights are scaled up, since a random one is too flat to catch mistakes.

    Args:
        patch: pixels of a patch.
        changes: other values of `TEXT`.
    """
    torch.manual_seed(seed)
    text = TEXT | changes
    vision = ARCHITECTURES[architecture] | {"out_hidden_size": text["hidden_size"], "patch_size": patch}
    if "window_size" in vision:
        vision["window_size"] = 4 * patch
    parts = {"text_config": text, "vision_config": vision}
    config = getattr(transformers, f"{architecture}Config")(**parts, **IDS)
    policy = getattr(transformers, f"{architecture}ForConditionalGeneration")(config).eval()
    sharpen(policy, sharpness)
    return policy


def image_processor(patch: int = PATCH) -> Any:
    size = {"shortest_edge": 4 * patch**2, "longest_edge": 256 * patch**2}
    return Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=size)


def image_store(patch: int = PATCH, kept: Path | None = None) -> ImageStore:
    return ImageStore(image_processor(patch), PLACEHOLDER, kept=kept)


def save_for_servers(directory: Path, architecture: str, seed: int = 0, **settings: Any) -> Path:
    """A model directory for a server. vLLM reads from the configuration what transformers knows of Qwen3-VL."""
    rope = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [6, 5, 5]}
    rope |= {"mrope_interleaved": True} if architecture == "Qwen3VL" else {}
    return save(directory, architecture, seed=seed, rope_parameters=rope, **SERVED, **settings)


@torch.no_grad()
def without_media(policy: Any) -> Any:
    """A policy that draws no placeholder and no beginning of an image: one value of the residual stream is constant,
    and its product with the output embeddings of these tokens is far below all others."""
    text = policy.model.language_model
    for layer in text.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    text.embed_tokens.weight[:, 0] = 1
    undrawn = [PLACEHOLDER, TOKEN["<|video_pad|>"], TOKEN["<|vision_start|>"]]
    text.embed_tokens.weight[undrawn, 0] = -1e4
    return policy


def save(
    directory: Path, architecture: str = "Qwen3VL", draws_media: bool = True, patch: int = PATCH, **settings: Any
) -> Path:
    """A model directory that transformers loads."""
    policy = model(architecture, patch=patch, **settings)
    (policy if draws_media else without_media(policy)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    image_processor(patch).save_pretrained(directory)
    return directory


class Processor(Qwen3VLProcessor):
    """transformers' processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = PLACEHOLDER, TOKEN[self.video_token]
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor() -> Processor:
    words = tokenizer()
    words.padding_side = "left"
    return Processor(image_processor(), words, TEMPLATE)


def picture(path: Path, size: tuple[int, int] = (24, 16), colour: str = "red", mark: int = 0) -> str:
    """Save an image with a square at place `mark`, and return its path."""
    image = Image.new("RGB", size, colour)
    image.paste("white", (mark, mark, mark + 8, mark + 8))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return str(path)
