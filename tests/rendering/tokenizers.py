"""Real tokenizers for real chat templates: byte-level BPE behind the families' own way to cut text, trained here.

The templates are those that the package trl ships, as their models have them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text before its merges; Qwen's differs in the digits only."""

SPECIAL = r"<\|[a-zA-Z_]+\|>|<\|?[a-z_]+\|?>|<｜[^｜]+｜>|\[gMASK\]|</?[a-z]+_(?:of_)?[a-z]+>|</?think>|</?s>|<[be]os>"
"""Special tokens of templates."""
FAMILY_TOKENS = (
    "<bos>",
    "<eos>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Special tokens that the families' own tokenizers have and that their templates need not write."""

ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "<eos>")
"""Tokens with which templates end turns."""
BEGINS = {"llama": "<|begin_of_text|>", "deepseek": "<｜begin▁of▁sentence｜>", "gemma": "<bos>"}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template `name`, and every special token that it writes."""
    text = template(name)
    special = sorted({*re.findall(SPECIAL, text), *FAMILY_TOKENS})
    model = Tokenizer(BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    model.train_from_iterator(
        [Path(__file__).read_text(), *(path.read_text() for path in TEMPLATES.glob("q*"))], trainer
    )
    ends = [token for token in ENDS if token in text]
    begins = [token for family, token in BEGINS.items() if family in name]
    model.add_special_tokens([AddedToken(token, special=True) for token in ["<unk>", *special]])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        chat_template=text,
        unk_token="<unk>",
        bos_token=begins[0] if begins else None,
        eos_token=ends[0] if ends else "<eos>" if "gemma" in name else "<unk>",
        clean_up_tokenization_spaces=False,
    )
