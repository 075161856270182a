"""Tokens at which a model's server stops by itself."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import AutoConfig, GenerationConfig

TRUSTED = True
"""Run code that a model brings with it: slime, SkyRL and OpenRLHF always do, and have before they call april."""


def stop_tokens(model: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens that a model's tokenizer and configuration declare, in ascending order.

    Args:
        model: directory or name of the model.
    """
    declared = [
        tokenizer.eos_token_id,
        AutoConfig.from_pretrained(model, trust_remote_code=TRUSTED).eos_token_id,
    ]
    with suppress(OSError):
        declared.append(GenerationConfig.from_pretrained(model, trust_remote_code=TRUSTED).eos_token_id)
    ids: set[Any] = set()
    for several in declared:
        ids.update(several if isinstance(several, list) else [several])
    return tuple(sorted(ids - {None}))
