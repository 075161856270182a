"""The attention implementation of a model's text layers. Layers that compute images keep their own, which is not
causal."""

from __future__ import annotations

from typing import Any


def text_attention(model: Any) -> str:
    """Return the implementation, as transformers names it."""
    implementation: str = model.config.get_text_config()._attn_implementation
    return implementation


def set_text_attention(model: Any, implementation: str) -> None:
    """Set the implementation."""
    config, text = model.config, model.config.get_text_config()
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    model.set_attn_implementation(dict.fromkeys(names, implementation) if names else implementation)
