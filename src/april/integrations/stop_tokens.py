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
    declaring = [tokenizer, AutoConfig.from_pretrained(model, trust_remote_code=TRUSTED)]
    with suppress(OSError):
        declaring.append(GenerationConfig.from_pretrained(model, trust_remote_code=TRUSTED))
    return end_tokens(*declaring)


def end_tokens(*declaring: Any) -> tuple[int, ...]:
    """Return the end tokens that these declare as `eos_token_id`, in ascending order.

    Args:
        declaring: tokenizer and configurations of a model; None declares nothing.
    """
    ids: set[Any] = set()
    for one in declaring:
        declared = getattr(one, "eos_token_id", None)
        ids.update(declared if isinstance(declared, list) else [declared])
    return tuple(sorted(ids - {None}))
