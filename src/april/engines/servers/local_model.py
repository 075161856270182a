"""Configuration of a model directory on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def local_config(model: str) -> dict[str, Any]:
    """Return the config of a local model directory; empty if there is none."""
    return _settings(model, "config.json")


def local_image_processor(model: str) -> dict[str, Any]:
    """Return the settings of the image processor in a local model directory; empty if there is none."""
    part = _settings(model, "processor_config.json").get("image_processor")
    return part or _settings(model, "preprocessor_config.json")


def _settings(model: str, name: str) -> dict[str, Any]:
    path = Path(model) / name
    return json.loads(path.read_text()) if path.is_file() else {}


def has_tied_head(model: str) -> bool:
    """Return whether the output layer is known to share the embeddings."""
    return bool(local_config(model).get("tie_word_embeddings"))


def local_vocab_size(model: str) -> int | None:
    """Return the vocabulary size of a local model directory; None if unknown."""
    config = local_config(model)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None
