"""Attention of one engine step: rows of many sequences in one forward pass, each reading its own keys and values.

Invariants:
- a step's tokens are packed into one row [1, tokens]: first one per decoding sequence, tier by tier, in the order of
  the tier's rows, then the runs: what prefills, and drafts, which stand behind their sequence's last token;
- keys and values of every token of the step are in the cache before any query of the same layer reads it;
- what a query sees depends on its sequence alone: its own position and earlier ones, within the layer's window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import AttentionInterface

from april.engines.embedded.kv_cache import KVCache, Tier
from april.engines.embedded.probe import refuse_unknown
from april.engines.embedded.sequence import Sequence
from april.engines.embedded.upload import upload
from april.engines.kernels import Bounds, KernelCase, VarlenKernel, attend, causal_mask, varlen_kernel

IMPLEMENTATION = "april_embedded"

_PADDING_WORTH_A_CALL = 64


class LayerCall(NamedTuple):
    """What a model's layer asks of attention: `query` [1, heads, tokens, head size], keys and values with KV heads."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float | None
    window: int | None
    softcap: float | None


class Attention(Protocol):
    def attend(self, call: LayerCall) -> torch.Tensor:
        """Outputs [1, tokens, heads, value size]."""
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
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} works inside april's embedded engine only")
    refuse_unknown(others)
    layer = getattr(module, "layer_idx", -1)
    return april_attention.attend(LayerCall(layer, query, key, value, scaling, sliding_window, softcap)), None


# No mask function is registered beside it: transformers then builds no masks, and the step makes its own.
AttentionInterface.register(IMPLEMENTATION, _dispatch)


class TokenRun(NamedTuple):
    """Tokens of one sequence that a step computes together, the first of them at position `start`."""

    sequence: Sequence
    start: int
    tokens: list[int]


class _Decode:
    """Tokens `start` to `stop` of the step: the decoding sequences of a tier, one each, at `positions` [sequences]."""

    def __init__(self, tier: Tier[Sequence], start: int, stop: int, keys: int, positions: torch.Tensor) -> None:
        self._span = slice(start, stop)
        self._length = keys
        self._positions = positions[:, None]
        self._keys, self._values = tier.views(stop - start, keys)
        self._grouped = (stop - start, tier.shape.heads, -1, tier.shape.key_size)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, call: LayerCall, query: torch.Tensor) -> torch.Tensor:
        layer, window = call.layer, call.window
        if window is not None and window >= self._length:
            window = None
        mask = self._masks.get(window)
        if mask is None:
            mask = self._masks[window] = causal_mask(self._positions, self._length, window, query.dtype)
        # The query heads that share a KV head become its queries, so keys and values are never repeated.
        grouped = query[self._span].reshape(self._grouped)
        out = attend(grouped, self._keys[layer], self._values[layer], mask, call.scaling, call.softcap)
        return out.flatten(1, 2)


@dataclass(slots=True)
class _Prefill:
    """Runs of several sequences of a tier, padded to one another: tokens `start` to `stop` of the step.

    `padded` [runs * longest] picks the tokens of the padded batch, `packed` [tokens] picks from it what is no padding;
    both None where nothing is padded. `rows` are the rows in the tier to read keys and values from, a slice where they
    stand side by side; None if the runs are the whole sequences so far, so that the step's own keys and values are all
    there is to see.
    """

    tier: Tier[Sequence]
    start: int
    stop: int
    runs: int
    longest: int
    keys: int
    positions: torch.Tensor
    rows: torch.Tensor | slice | None
    padded: torch.Tensor | None
    packed: torch.Tensor | None
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            keys, values = self._batch(key), self._batch(value)
        else:
            keys = self.tier.keys[call.layer][self.rows, :, : self.keys]
            values = self.tier.values[call.layer][self.rows, :, : self.keys]
        out = attend(self._batch(query), keys, values, self._mask(call, query.dtype), call.scaling, call.softcap)
        flat = out.transpose(1, 2).reshape(self.runs * self.longest, query.shape[1], -1)
        return flat if self.packed is None else flat.index_select(0, self.packed)

    def _batch(self, tokens: torch.Tensor) -> torch.Tensor:
        picked = tokens[self.start : self.stop] if self.padded is None else tokens[self.padded]
        return picked.view(self.runs, self.longest, *picked.shape[1:]).transpose(1, 2)

    def _mask(self, call: LayerCall, dtype: torch.dtype) -> torch.Tensor | None:
        window = None if call.window is None or call.window >= self.keys else call.window
        if self.rows is None and window is None and call.softcap is None:
            return None
        if window not in self.masks:
            self.masks[window] = causal_mask(self.positions, self.keys, window, dtype)
        return self.masks[window]


class ForwardPass:
    """One forward pass: every decoding sequence's last token and draft, and `chunks` of sequences that prefill.

    Attributes:
        sequences: the sequences whose next token this pass computes, and those behind it where they have drafts.
        tokens, positions: [1, tokens], what the model reads.
        sampled: the tokens whose logits are wanted, in the order of `sequences`; None for all of them.
    """

    def __init__(self, cache: KVCache[Sequence], chunks: Iterable[tuple[Sequence, int]], device: torch.device) -> None:
        self._cache = cache
        self._decoding = [tier for tier in cache.tiers if tier.decoding]
        self.sequences = [sequence for tier in self._decoding for sequence in tier.decoding]
        self._groups = _batches([*_drafts(self.sequences), *_prefills(chunks)])
        # All tokens in order, as runs of one sequence each: those that decode are runs of one token.
        self._runs = [TokenRun(each, each.kv_length, each.tokens[-1:]) for each in self.sequences]
        wanted = {sequence: [place] for place, sequence in enumerate(self.sequences)}
        count = len(self._runs)
        for run in (run for group in self._groups for run in group):
            sequence, size = run.sequence, len(run.tokens)
            if sequence in wanted:
                wanted[sequence] += range(count, count + size)
            elif run.start + size == len(sequence.tokens):
                self.sequences.append(sequence)
                wanted[sequence] = [count + size - 1]
            count += size
            self._runs.append(run)
        tokens = [token for run in self._runs for token in run.tokens]
        positions = [position for run in self._runs for position in range(run.start, run.start + len(run.tokens))]
        self._sizes = np.array([len(run.tokens) for run in self._runs])
        self._rows = np.array([(_tier(run).begin(run.sequence.row), _tier(run).length) for run in self._runs])
        begins, lengths = self._rows.repeat(self._sizes, axis=0).T
        sampled = [place for sequence in self.sequences for place in wanted[sequence]] if self._groups else []
        sent = upload(np.concatenate((tokens, positions, begins, lengths, np.array(sampled, int))), device)
        self.tokens, self.positions, begins, lengths = sent[: 4 * count].view(4, 1, count).unbind(0)
        self.sampled = sent[4 * count :] if self._groups else None
        heads = torch.arange(cache.shape.heads, device=device)
        self._places = (begins.T + heads * lengths.T + self.positions.T).flatten()
        self._kernels: dict[bool, VarlenKernel | None] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        key, value = (tensor[0].transpose(0, 1) for tensor in (call.key, call.value))
        keys.index_copy_(0, self._places, key.flatten(0, 1))
        values.index_copy_(0, self._places, value.flatten(0, 1))
        heads, tokens = self._cache.shape.heads, call.query.shape[2]
        group = call.query.shape[1] // heads
        softcap = call.softcap is not None
        if softcap not in self._kernels:
            sizes = keys.shape[1], values.shape[1]
            case = KernelCase(keys.device, keys.dtype, group, 1, *sizes, softcap, cached=True)
            self._kernels[softcap] = varlen_kernel(case)
        kernel = self._kernels[softcap]
        if kernel is not None:
            # To the kernel each KV head of a sequence is a sequence, whose query heads share its keys. A sequence's
            # queries have to follow one another: in the order of heads, which takes copies, if any has several.
            query = call.query[0].unflatten(0, (heads, group)).movedim(2, 1 if self._groups else 0)
            pools = (keys.unsqueeze(1), values.unsqueeze(1))
            out = kernel(query.flatten(0, 1), *pools, self._bounds, call.scaling, call.window, call.softcap)
            if self._groups:
                out = out.view(heads, tokens, group, -1).transpose(0, 1)
            return out.reshape(1, tokens, heads * group, -1)
        query = call.query[0].transpose(0, 1)
        decodes, prefills = self._by_tier
        parts = [decode.attend(call, query) for decode in decodes]
        parts += [prefill.attend(call, query, key, value) for prefill in prefills]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    @cached_property
    def _bounds(self) -> Bounds:
        """Bounds of every run in every KV head, for a kernel that computes all of them in one call."""
        heads = np.arange(self._cache.shape.heads)[:, None]
        used = np.array([run.start for run in self._runs]) + self._sizes
        firsts = heads * self._sizes.sum() + self._sizes.cumsum() - self._sizes
        begins = self._rows[:, 0] + heads * self._rows[:, 1]
        seen = np.broadcast_to(used, begins.shape)
        if not self._groups:
            firsts, begins, seen = np.arange(begins.size), begins.T, seen.T
        ends = self._sizes.sum() * len(heads), self._cache.keys[0].shape[0]
        parts = (firsts.flatten(), ends[:1], begins.flatten(), ends[1:], seen.flatten())
        table = upload(np.concatenate(parts).astype(np.int32), self.tokens.device)
        bounds = table.split([begins.size + 1, begins.size + 1, begins.size])
        return Bounds(bounds[0], bounds[1], int(self._sizes.max()), _multiple(int(used.max()), 128), bounds[2])

    @cached_property
    def _by_tier(self) -> tuple[list[_Decode], list[_Prefill]]:
        """The calls of attention where no kernel computes all runs in one."""
        decodes, prefills, start, device = [], [], 0, self.tokens.device
        for tier in self._decoding:
            stop = start + len(tier.decoding)
            keys = _aligned(max(run.start for run in self._runs[start:stop]) + 1, tier)
            decodes.append(_Decode(tier, start, stop, keys, self.positions[0, start:stop]))
            start = stop
        for group in self._groups:
            stop = start + sum(len(run.tokens) for run in group)
            prefills.append(_prefill(group, start, stop, device))
            start = stop
        return decodes, prefills


def _tier(run: TokenRun) -> Tier[Sequence]:
    assert run.sequence.tier is not None
    return run.sequence.tier


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _aligned(keys: int, tier: Tier[Sequence]) -> int:
    """Some kernels want masks whose rows are multiples of eight; a tier's length is one."""
    return min(_multiple(keys, 8), tier.length)


def _drafts(sequences: Iterable[Sequence]) -> Iterator[TokenRun]:
    return (TokenRun(each, each.kv_length + 1, each.draft) for each in sequences if each.draft)


def _prefills(chunks: Iterable[tuple[Sequence, int]]) -> Iterator[TokenRun]:
    for sequence, size in chunks:
        start = sequence.kv_length
        yield TokenRun(sequence, start, sequence.tokens[start : start + size])


def _batches(runs: Iterable[TokenRun]) -> list[list[TokenRun]]:
    """Runs that share an attention call: of one tier, all fresh or none, padded to one another at little cost."""

    def kind(run: TokenRun) -> tuple[int, bool]:
        return _tier(run).length, run.start > 0

    def span(run: TokenRun) -> tuple[int, int]:
        return len(run.tokens), run.start

    batches: list[list[TokenRun]] = []
    ordered = sorted(runs, key=lambda run: (*kind(run), *span(run)))
    for _, similar in groupby(ordered, key=kind):
        batch: list[TokenRun] = []
        total = 0
        for run in similar:
            size = len(run.tokens)
            padding = (len(batch) + 1) * size - (total + size)
            if batch and padding > _PADDING_WORTH_A_CALL + total // 8:
                batches.append(batch)
                batch, total = [], 0
            batch.append(run)
            total += size
        batches.append(batch)
    return [sorted(batch, key=lambda run: run.sequence.row) for batch in batches]


def _prefill(group: list[TokenRun], start: int, stop: int, device: torch.device) -> _Prefill:
    tier = _tier(group[0])
    sizes = np.array([len(run.tokens) for run in group])
    begins = np.array([run.start for run in group])
    longest = int(sizes.max())
    offsets = np.arange(longest)
    positions = begins[:, None] + offsets
    padded = packed = None
    if sizes.sum() < len(group) * longest:
        real = offsets < sizes[:, None]
        firsts = start + sizes.cumsum() - sizes
        padded = upload((firsts[:, None] + np.where(real, offsets, 0)).flatten(), device)
        packed = upload(real.flatten().nonzero()[0], device)
    fresh = not bool(begins.any())
    rows = None if fresh else _side_by_side([run.sequence.row for run in group], device)
    keys = longest if fresh else _aligned(int((begins + sizes).max()), tier)
    return _Prefill(tier, start, stop, len(group), longest, keys, upload(positions, device), rows, padded, packed)


def _side_by_side(rows: list[int], device: torch.device) -> torch.Tensor | slice:
    """Ascending `rows` as a slice, which copies nothing, if none is missing between them."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return upload(np.array(rows), device)
