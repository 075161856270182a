"""Continuous batching in the process, over the Hugging Face module that is being trained.

`engine` decides what runs in a step, `kv_cache` where keys and values live, `attention` is what the model's layers
call, `sampling` draws tokens, `model` is the trained module seen from here, `sequence` one sample on its way.
"""

from april.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
