"""What TRL's asynchronous trainer needs on a CPU: a flash attention kernel, and no peak FLOPs of a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.async_grpo import async_grpo_trainer, packing


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> Tensor:
    """Causal attention of each segment of queries over its own keys, whose last ones are the segment's."""
    out = []
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(out)


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
