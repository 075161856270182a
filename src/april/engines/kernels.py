"""Attention kernels shared by training and the embedded engine.

Invariants:
- a kernel for packed sequences is used on a device only after a trial on it gave the same results as `attend`;
- on CUDA, cuDNN's attention is never chosen (it builds a plan for every new shape), and grouped-query attention never
  falls back to the MATH kernel, whose memory is quadratic in the length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

log = logging.getLogger(__name__)

_SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Compute grouped-query attention, [batch, heads, queries, head size]; causal if there is no mask.

    `softcap` bounds the scores by softcap · tanh(scores / softcap) (Gemma 2, arXiv 2408.00118, section 2) and needs a
    mask.
    """
    if softcap is None:
        grouped = query.shape[1] != key.shape[1]
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling}
        if not query.is_cuda:
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)
        if grouped and not _is_fused(query, key, value, mask, grouped):
            # Copies of keys and values are small compared with the scores that MATH keeps.
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
            grouped = False
        # Called for its warning: this call may run in the MATH kernel, too.
        if not grouped:
            _is_fused(query, key, value, mask, grouped)
        with sdpa_kernel(_SDPA_KERNELS):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)
    assert mask is not None
    # scaled_dot_product_attention cannot cap scores. Softmax is in float32, as in transformers' eager attention.
    batch, heads, queries, size = query.shape
    groups = query.reshape(batch, key.shape[1], -1, queries, size)
    scores = groups @ key.unsqueeze(2).transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap + mask.unsqueeze(1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return (weights @ value.unsqueeze(2)).reshape(batch, heads, queries, -1)


def _is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> bool:
    """Whether PyTorch has a kernel other than MATH for such a call; without grouped heads, warn if it has none.

    The answer is cached per kind of call.
    """
    kind = (query.device, query.dtype, query.shape[-1], value.shape[-1], mask is None, grouped, query.requires_grad)
    if kind not in _fused:
        call = (query, key, value, mask, 0.0, mask is None, grouped)
        _fused[kind] = _has_fused_kernel(call)
        if not (_fused[kind] or grouped):
            _has_fused_kernel(call, debug=True)  # PyTorch warns with its reasons
            log.warning(
                "attention in %s with heads of %d runs in PyTorch's MATH kernel, whose memory is quadratic in the "
                "length: PyTorch's warnings name the reasons",
                query.dtype,
                query.shape[-1],
            )
    return _fused[kind]


def _has_fused_kernel(call: tuple[Any, ...], debug: bool = False) -> bool:
    params = torch.backends.cuda.SDPAParams(*call)
    # Query both kernels without short-circuit: with `debug`, each query warns of its own reasons.
    flash = torch.backends.cuda.can_use_flash_attention(params, debug)
    return torch.backends.cuda.can_use_efficient_attention(params, debug) or flash


_fused: dict[tuple[Any, ...], bool] = {}


def causal_mask(positions: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [batch, 1, queries, keys] for queries at `positions` [batch, queries]."""
    key_positions = torch.arange(keys, device=positions.device)
    hidden = key_positions > positions[..., None]
    if window is not None:
        hidden |= key_positions <= positions[..., None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    # The lowest finite number, because for a query that is padding all keys may be masked.
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Queries and keys of the sequences of a packed row.

    Args:
        queries: [sequences + 1] int32, first query of each sequence, then the number of queries.
        keys: the same for keys. With `used`, keys of several sequences may overlap and be in any order.
        longest_query, longest_key: largest numbers of queries and keys of a sequence.
        used: [sequences] int32, number of keys of each sequence; None if the keys of all sequences are adjacent.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    used: Tensor | None = None


class VarlenKernel(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Bounds,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Compute causal attention within each sequence, [tokens, heads, head size].

        The last query of a sequence attends to its last key.
        """
        ...


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kind of call, for which kernels are tried.

    Args:
        heads, kv_heads, key_size, value_size: dimensions of a layer.
        softcap: whether scores are capped.
        cached: whether keys are in a cache (`Bounds.used`), without a backward pass.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    softcap: bool
    cached: bool


def flash_attn() -> VarlenKernel:
    """Return the kernel of the package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Bounds,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            query,
            key,
            value,
            bounds.queries,
            bounds.keys,
            bounds.longest_query,
            bounds.longest_key,
            softmax_scale=scaling,
            causal=True,
            # The window includes the query's own key; the kernel counts only the keys to its left.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            # Releases of flash-attn before 2.6 lack this parameter.
            **({} if softcap is None else {"softcap": softcap}),
        )
        return out

    return call


def torch_varlen() -> VarlenKernel:
    """Return PyTorch's own kernel."""
    from torch.nn.attention.varlen import varlen_attn

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Bounds,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if softcap is not None:
            raise ValueError("does not cap scores")
        # Older releases of PyTorch lack this parameter, which training does not need.
        cached: dict[str, Any] = {} if bounds.used is None else {"seqused_k": bounds.used}
        out = varlen_attn(
            query,
            key,
            value,
            bounds.queries,
            bounds.keys,
            bounds.longest_query,
            bounds.longest_key,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            **cached,
        )
        assert isinstance(out, Tensor)
        return out

    return call


@lru_cache
def varlen_kernel(case: KernelCase) -> VarlenKernel | None:
    """Return the first kernel for packed sequences that passes a trial on the device; None if there is none.

    The result and, for every kernel that failed, the reason are logged once.
    """
    # flash-attn's function for training does not accept the numbers of used keys.
    kernels: dict[str, Callable[[], VarlenKernel]] = {} if case.cached else {"flash-attn": flash_attn}
    kernels["torch.nn.attention.varlen"] = torch_varlen
    what = f"attention over {'the KV cache' if case.cached else 'packed sequences'} ({case.device}, {case.dtype})"
    level = logging.DEBUG if case.device.type == "cpu" else logging.WARNING
    for name, load in kernels.items():
        try:
            kernel = load()
            with _undisturbed(case):
                _try(kernel, case)
        except Exception as error:  # any failure of any library: try the next kernel
            reason = str(error).partition("\n")[0]
            log.log(level, "%s does not use %s: %s: %s", what, name, type(error).__name__, reason)
            continue
        log.info("%s uses %s", what, name)
        return kernel
    log.log(level, "%s uses scaled_dot_product_attention, one call for sequences of similar length", what)
    return None


@contextmanager
def _undisturbed(case: KernelCase) -> Iterator[None]:
    """Isolate a trial from the modes of the surrounding forward pass: autocast, no_grad, checkpointing."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    # Innermost hooks apply: the identity keeps hooks of activation checkpointing away from the trial's tensors.
    with (
        torch.autocast(case.device.type, enabled=False),
        torch.inference_mode(case.cached),
        torch.set_grad_enabled(not case.cached),
        torch.autograd.graph.saved_tensors_hooks(same, same),
    ):
        yield


def _try(kernel: VarlenKernel, case: KernelCase) -> None:
    """Compare the kernel with `attend`, with and without a window, and its gradients if there is a backward pass.

    Raises:
        ValueError: the results differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int, size: int) -> Tensor:
        made = torch.randn(tokens, heads, size, generator=generator).to(case.device, case.dtype)
        return made.requires_grad_(not case.cached)

    # As in a KV cache: keys overlap, are in any order, and outnumber the queries.
    if case.cached:
        begins, queries, used = [40, 0, 40, 8], [1, 3, 4, 20], [9, 3, 13, 31]
    else:
        queries = used = [17, 3, 1, 40]
        begins = [0, 17, 20, 21]
    firsts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    keys = max(begin + count for begin, count in zip(begins, used, strict=True))
    query = random(firsts[-1], case.heads, case.key_size)
    key, value = random(keys, case.kv_heads, case.key_size), random(keys, case.kv_heads, case.value_size)
    bounds = Bounds(
        torch.tensor(firsts, dtype=torch.int32, device=case.device),
        torch.tensor([*begins, keys], dtype=torch.int32, device=case.device),
        max(queries),
        max(used),
        torch.tensor(used, dtype=torch.int32, device=case.device) if case.cached else None,
    )
    cap = 1.0 if case.softcap else None
    for window in (None, 3):
        found = [kernel(query, key, value, bounds, None, window, cap)]
        expected = [_reference(query, key, value, firsts, begins, used, window, cap)]
        if not case.cached:
            # Random weights, because errors of opposite signs cancel in the gradient of a plain sum.
            weights = torch.randn(found[0].shape, generator=generator).to(found[0])
            for results in (found, expected):
                results += torch.autograd.grad((results[0] * weights).sum(), (query, key, value))
        # bfloat16 rounds to 2^-8 (relative); a wrong mask or window causes a far larger difference.
        tolerance = 1e-3 if case.dtype == torch.float32 else 0.03
        for one, other in zip(found, expected, strict=True):
            one, other = one.detach().float(), other.detach().float()
            difference = float((one - other).norm() / other.norm())
            # Negated, so that NaN fails as well.
            if not difference <= tolerance:
                raise ValueError(f"differs from scaled_dot_product_attention by {difference:.1e} (relative)")


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    firsts: list[int],
    begins: list[int],
    used: list[int],
    window: int | None,
    softcap: float | None,
) -> Tensor:
    parts = []
    for first, last, begin, count in zip(firsts, firsts[1:], begins, used, strict=False):
        positions = torch.arange(count - (last - first), count, device=query.device)[None]
        mask = causal_mask(positions, count, window, torch.float32)
        own = (query[first:last], key[begin : begin + count], value[begin : begin + count])
        q, k, v = (tensor.float().transpose(0, 1)[None] for tensor in own)
        out = attend(q, k, v, mask, None, softcap)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
