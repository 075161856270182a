"""Packing: concatenated sequences in a single row, so that no layer computes padding.

Only attention needs the sequences' boundaries. It is one call of a kernel for packed sequences if the device has one
(GPUs in half precision), and otherwise one call for each run of sequences of similar length, padded if that costs
little.

Invariants:
- no token attends to another sequence;
- a model is packed only if it computes the same as for each sequence alone (`can_pack`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from april.engines.embedded.probe import LENGTHS, agrees, refuse_unknown, short_windows
from april.engines.kernels import Bounds, KernelCase, attend, causal_mask, varlen_kernel
from april.engines.text_attention import set_text_attention, text_attention
from april.training.context_parallel import ContextParallel
from april.training.policy import trunk_of

log = logging.getLogger(__name__)

IMPLEMENTATION = "april_packed"

PADDING_SHARE = 8
"""Sequences share an attention call if at most one token in this many is padding."""


@dataclass(frozen=True, slots=True)
class _Padded:
    """Consecutive sequences, tokens `start` to `stop`, that share an attention call.

    `padded` [sequences · longest] indexes the tokens of a padded batch, and `packed` [tokens] indexes the tokens
    without padding in it; both are None if all lengths are equal.
    """

    start: int
    stop: int
    sequences: int
    longest: int
    padded: Tensor | None
    packed: Tensor | None


class Packing:
    """Boundaries of the sequences in a packed row.

    Args:
        lengths: lengths of the sequences; sorted lengths need the fewest attention calls.
        context: ranks that share the row; None if this rank has the whole row.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, context: ContextParallel | None = None) -> None:
        self.lengths = lengths
        self.context = context
        self.device = device
        self.position_ids = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
        firsts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        self.bounds = Bounds(firsts, firsts, max(lengths), max(lengths))
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    @cached_property
    def runs(self) -> list[_Padded]:
        return list(_runs(self.lengths, self.device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, cap: float | None
    ) -> Tensor:
        """Causal attention within each sequence: [1, heads, tokens, size] to [1, tokens, heads, size]."""
        if torch.is_autocast_enabled(query.device.type):
            # Autocast does not cast inputs of the kernels, and computes rotary embeddings in float32.
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        heads, sizes = (query.shape[1], key.shape[1]), (key.shape[3], value.shape[3])
        kernel = varlen_kernel(KernelCase(query.device, query.dtype, *heads, *sizes, cap is not None, cached=False))
        if kernel is not None:
            return kernel(queries, keys, values, self.bounds, scaling, window, cap)[None]
        parts = []
        for run in self.runs:
            mask = self._mask(run, window, cap, query)
            out = attend(_batch(queries, run), _batch(keys, run), _batch(values, run), mask, scaling, cap)
            flat = out.transpose(1, 2).reshape(run.sequences * run.longest, out.shape[1], -1)
            parts.append(flat if run.packed is None else flat.index_select(0, run.packed))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _mask(self, run: _Padded, window: int | None, cap: float | None, query: Tensor) -> Tensor | None:
        # A window that covers the longest sequence removes nothing, and causal attention alone needs no mask.
        window = None if window is None or window >= run.longest else window
        if window is None and cap is None:
            return None
        if (run.longest, window) not in self._masks:
            positions = torch.arange(run.longest, device=query.device)[None]
            self._masks[run.longest, window] = causal_mask(positions, run.longest, window, query.dtype)
        return self._masks[run.longest, window]


def _runs(lengths: Sequence[int], device: torch.device) -> Iterator[_Padded]:
    first, start = 0, 0
    for last in range(1, len(lengths) + 1):
        tokens, longest = sum(lengths[first:last]), max(lengths[first:last])
        if last < len(lengths):
            whole = (last + 1 - first) * max(longest, lengths[last])
            if whole - tokens - lengths[last] <= whole // PADDING_SHARE:
                continue
        count = last - first
        padded = packed = None
        if tokens < count * longest:
            sizes, offsets = torch.tensor(lengths[first:last]), torch.arange(longest)
            real = offsets < sizes[:, None]
            firsts = sizes.cumsum(0) - sizes
            # Padding repeats the first token. Any token would do: causal attention never reads behind a position.
            padded = (firsts[:, None] + torch.where(real, offsets, 0)).flatten().to(device)
            packed = real.flatten().nonzero()[:, 0].to(device)
        yield _Padded(start, start + tokens, count, longest, padded, packed)
        first, start = last, start + tokens


def _batch(tokens: Tensor, run: _Padded) -> Tensor:
    """Return a run as [sequences, heads, longest, size], from [tokens, heads, size]."""
    own = tokens[run.start : run.stop]
    picked = own if run.padded is None else own.index_select(0, run.padded)
    return picked.reshape(run.sequences, run.longest, *picked.shape[1:]).transpose(1, 2)


def _dispatch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    april_packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if april_packing is None:
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} works inside april's training step only")
    refuse_unknown(others)
    context = april_packing.context
    if context is not None:
        query, key, value = (context.heads(tensor) for tensor in (query, key, value))
    out = april_packing.attend(query, key, value, scaling, sliding_window, softcap)
    return out if context is None else context.tokens(out), None


# Without a registered mask function, transformers builds no masks.
AttentionInterface.register(IMPLEMENTATION, _dispatch)


@contextmanager
def packed_attention(*models: Any) -> Iterator[None]:
    """Make the models' attention work on packed rows inside."""
    before = [text_attention(model) for model in models]
    for model in models:
        set_text_attention(model, IMPLEMENTATION)
    try:
        yield
    finally:
        for model, implementation in zip(models, before, strict=True):
            set_text_attention(model, implementation)


def attends_packed(model: Any) -> bool:
    return text_attention(model) == IMPLEMENTATION


def can_pack(model: Any) -> bool:
    """Whether `model` has the same results for packed sequences, within its attention windows and beyond."""
    trunk = trunk_of(model)

    def alone(ids: Tensor) -> Tensor:
        hidden: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state[0]
        return hidden

    def packed(ids: Tensor, positions: Tensor) -> Tensor:
        packing = Packing(LENGTHS, ids.device)
        with packed_attention(model):
            hidden: Tensor = trunk(
                input_ids=ids, position_ids=positions, use_cache=False, april_packing=packing
            ).last_hidden_state[0]
        return hidden

    try:
        with short_windows(model):
            if agrees(model, alone, packed):
                return True
        reason = "packed sequences change its results"
    # A trunk that refuses `april_packing`, or does not pass it on to attention, raises one of these.
    except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    log.warning("%s: training batches are padded, not packed: %s", type(model).__name__, reason)
    return False
