"""Attention kernels: the chosen ones, and their speed against PyTorch's own choice, including cuDNN.

Each call is timed with one shape again and again, and with a new length each time: cuDNN plans each new shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_parts.bench import Bench
from parts import Figures
from record import spread
from torch import Tensor
from torch.nn.attention import SDPBackend

from april.engines import kernels
from april.engines.kernels import Bounds, KernelCase, attend, varlen_kernel

BACKENDS = {int(backend): name for name, backend in SDPBackend.__members__.items()}
Call = Callable[[Tensor, Tensor, Tensor], Any]


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def measure(bench: Bench) -> Figures:
    kept = Kept()
    kernels.log.setLevel(logging.DEBUG)
    kernels.log.addHandler(kept)
    shape, device = bench.shape, torch.device(bench.device)
    heads = (shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    for dtype in (torch.bfloat16, torch.float32):
        for cached in (False, True):
            varlen_kernel(KernelCase(device, dtype, *heads, softcap=False, cached=cached))
    yield "log", kept.messages
    yield "cudnn_enabled", torch.backends.cuda.cudnn_sdp_enabled()
    for name, (batch, queries, keys, grad) in calls(bench).items():
        yield name, compared(bench, batch, queries, keys, grad)
    yield "packed sequences", packed(bench)
    yield "log", kept.messages  # and what the calls have added


def calls(bench: Bench) -> dict[str, tuple[int, int | None, int, bool]]:
    """Batch, queries (None: the number of keys), keys, and whether there is a backward pass."""
    return {
        "training": (2, None, bench.size(4096, 64), True),
        "prefill": (4, None, bench.size(512, 32), False),
        "decode": (bench.size(64, 4), 1, bench.size(2048, 64), False),
    }


def compared(bench: Bench, batch: int, queries: int | None, keys: int, grad: bool) -> dict[str, Any]:
    shape, scale = bench.shape, 1.0 / bench.shape.head_dim**0.5
    causal = queries is None

    def tensors(length: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = (shape.heads, queries or length), (shape.kv_heads, length), (shape.kv_heads, length)
        made = [torch.randn(batch, *row, shape.head_dim, device=bench.device, dtype=torch.bfloat16) for row in rows]
        return made[0].requires_grad_(grad), made[1].requires_grad_(grad), made[2].requires_grad_(grad)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

    def april(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None if causal else torch.zeros(batch, 1, queries or 1, k.shape[2], device=q.device, dtype=q.dtype)
        return attend(q, k, v, mask, scale, None)

    q, k, v = tensors(keys)
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=True)
    found: dict[str, Any] = {"PyTorch alone chooses": BACKENDS[int(chosen)]}
    lengths = [keys - 8 * i for i in range(bench.size(6, 3))]
    for name, call in (("PyTorch alone", alone), ("april", april)):
        found[name] = {
            "same_shape_ms": timed(bench, call, [tensors(keys)] * len(lengths), grad),
            "new_lengths_ms": timed(bench, call, [tensors(length) for length in lengths], grad),
        }
    return found


def timed(bench: Bench, call: Call, given: list[tuple[Tensor, Tensor, Tensor]], grad: bool) -> dict[str, float]:
    taken = []
    for tensors in given:
        began = bench.clock()
        out = call(*tensors)
        if grad:
            out.float().sum().backward()
        taken.append(1e3 * (bench.clock() - began))
    return spread(taken[1:])  # the first one loads the kernel


def packed(bench: Bench) -> dict[str, Any] | None:
    """april's kernel for packed sequences, forward and backward; None if none works on this device."""
    shape, device = bench.shape, torch.device(bench.device)
    heads = (shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    kernel = varlen_kernel(KernelCase(device, torch.bfloat16, *heads, softcap=False, cached=False))
    if kernel is None:
        return None
    taken = []
    for i in range(4):
        lengths = [bench.size(700, 9) + 13 * i + j for j in range(10)]
        total = sum(lengths)
        bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        q, k, v = (
            torch.randn(total, count, shape.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for count in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        began = bench.clock()
        kernel(q, k, v, Bounds(bounds, bounds, max(lengths), max(lengths)), None, None, None).float().sum().backward()
        taken.append(1e3 * (bench.clock() - began))
    return {"tokens": total, "new_lengths_ms": spread(taken[1:])}
