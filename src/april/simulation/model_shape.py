"""The shape of the recipe's model, from its config.json or its name on the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.simulation.hardware import MODELS, ModelShape

HUB = {"deepseek-r1-distill-qwen-1.5b": "r1-distill-1.5b", "glm-4-9b-0414": "glm4-9b"}
"""Names on the hub that differ from the names of `MODELS` by more than upper case."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of(path: str) -> ModelShape:
    """Return the shape of the model at `path`, a directory or a hub name.

    Raises:
        ValueError: the shape is unknown, or not supported by the roofline.
    """
    config = Path(os.path.expanduser(path)) / "config.json"
    if config.is_file():
        read = json.loads(config.read_text())
        return _from_config(config, read.get("text_config", read))
    name = path.rpartition("/")[2].lower()
    if (shape := MODELS.get(HUB.get(name, name))) is None:
        raise ValueError(
            f"model.path = {path!r}: the shape of this model is not known: name a directory that contains the model, "
            f"or a similar model with --model ({', '.join(MODELS)})"
        )
    return shape


def configuration_of(shape: ModelShape) -> Any:
    """Return a configuration of transformers with this shape: Qwen3, or Qwen3 MoE."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 1 << 20,
    }
    if shape.experts == 1:
        return Qwen3Config(**common)
    experts: dict[str, Any] = {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
    return Qwen3MoeConfig(**common, **experts, moe_intermediate_size=shape.intermediate)


def _from_config(path: Path, config: Mapping[str, Any]) -> ModelShape:
    experts = next((found for name in EXPERTS if (found := config.get(name))), 1)
    every, dense = config.get("decoder_sparse_step", 1) == 1, config.get("mlp_only_layers")
    if experts > 1 and ("moe_intermediate_size" not in config or dense or not every):
        raise ValueError(
            f"{path}: mixtures of experts are supported only if all layers are alike, as Qwen3's are: measure this "
            "model (--cost-model)"
        )
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return ModelShape(
            name=path.parent.name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["moe_intermediate_size" if experts > 1 else "intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", True)),
            experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts > 1 else 1,
        )
    except KeyError as error:
        raise ValueError(f"{path}: no {error} there: name a similar model with --model ({', '.join(MODELS)})") from None
