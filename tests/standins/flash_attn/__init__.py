"""A stand-in for the package flash-attn: exact, in float64, and slow.

Its function has flash-attn's signature and meaning: the last query of a sequence sees the last key, a window counts the
keys before a query's own, and only half precision is accepted unless a test allows more.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[tuple[int, ...]] = []
"""Shape of the queries of each call."""
dtypes = [torch.float16, torch.bfloat16]
"""Accepted types; a test may add others."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    if q.dtype not in dtypes:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.diff().max() == max_seqlen_q
    assert cu_seqlens_k.diff().max() == max_seqlen_k
    calls.append(tuple(q.shape))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups, out = q.shape[1] // k.shape[1], []
    for i in range(len(cu_seqlens_q) - 1):
        queries = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].double().transpose(0, 1)
        own = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        keys, values = (t[own].double().transpose(0, 1).repeat_interleave(groups, 0) for t in (k, v))
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        last = keys.shape[1] - queries.shape[1] + torch.arange(queries.shape[1])[:, None]
        behind = last - torch.arange(keys.shape[1])
        left, right = window_size
        hidden = behind < (0 if causal else -right if right >= 0 else -keys.shape[1])
        if left >= 0:
            hidden |= behind > left
        out.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1).to(q.dtype))
    return torch.cat(out)
