"""Stands in for Megatron-LM's parser of arguments, whose package requires Python 3.12: the flags that slime reads.
Other flags of Megatron's are ignored, as SGLang's are."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

NAMES = ("save", "load", "tokenizer-model", "tokenizer-type")
NUMBERS: dict[str, int | None] = {
    "seed": 1234,
    "micro-batch-size": None,
    "global-batch-size": None,
    "seq-length": None,
    "max-position-embeddings": None,
    "rotary-base": 10000,
    "vocab-size": None,
    "padded-vocab-size": None,
    "num-layers": None,
    "hidden-size": None,
    "ffn-hidden-size": None,
    "num-attention-heads": None,
    "num-query-groups": 1,
    "kv-channels": None,
    "num-experts": None,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
}
SWITCHES = (
    *("fp16", "finetune", "no-load-optim", "no-load-rng"),
    *("multi-latent-attention", "untie-embeddings-and-output-weights"),
)


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser], ignore_unknown_args: bool
) -> argparse.Namespace:
    assert ignore_unknown_args
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in NAMES:
        parser.add_argument(f"--{name}")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--norm-epsilon", type=float, default=1e-5)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    return extra_args_provider(parser).parse_known_args()[0]


def validate_args(args: Any) -> None:
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
