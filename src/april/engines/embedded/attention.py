"""The attention function that the layers of a served model call.

transformers' AttentionInterface calls `_dispatch` for each layer, which passes the call on to the `Attention` of the
forward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from april.engines.embedded.probe import refuse_unknown

IMPLEMENTATION = "april_embedded"


class LayerCall(NamedTuple):
    """Arguments of one layer's attention: `query` [1, heads, tokens, head size], keys and values with KV heads."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float | None
    window: int | None
    softcap: float | None


class Attention(Protocol):
    def attend(self, call: LayerCall) -> torch.Tensor:
        """Return outputs [1, tokens, heads, value size]."""
        ...


def _dispatch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    april_attention: Attention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if april_attention is None:
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} works in april's embedded engine only")
    refuse_unknown(others)
    layer = getattr(module, "layer_idx", -1)
    return april_attention.attend(LayerCall(layer, query, key, value, scaling, sliding_window, softcap)), None


# Without a registered mask function transformers builds no masks; the forward pass makes its own.
AttentionInterface.register(IMPLEMENTATION, _dispatch)
