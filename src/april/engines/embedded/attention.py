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
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from april.engines.embedded.kv_cache import KVCache, Tier
from april.engines.embedded.probe import refuse_unknown
from april.engines.embedded.sequence import Sequence
from april.engines.kernels import attend, causal_mask

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


class _Write:
    """Puts keys and values of the step's tokens `start` to `stop` into the cache, at the flat `index`."""

    def __init__(self, tier: Tier[Sequence], start: int, stop: int, index: torch.Tensor) -> None:
        self._span = slice(start, stop)
        self._index = index
        self._keys, self._values = tier.flat()

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._keys[layer].index_copy_(0, self._index, key[self._span].flatten(0, 1))
        self._values[layer].index_copy_(0, self._index, value[self._span].flatten(0, 1))


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
        decoding = [tier for tier in cache.tiers if tier.decoding]
        self.sequences = [sequence for tier in decoding for sequence in tier.decoding]
        tokens = [sequence.tokens[-1] for sequence in self.sequences]
        positions = [sequence.kv_length for sequence in self.sequences]
        rows = [row for tier in decoding for row in range(len(tier.decoding))]
        wanted = {sequence: [place] for place, sequence in enumerate(self.sequences)}
        groups = _batches([*_drafts(self.sequences), *_prefills(chunks)])
        for sequence, start, run in (each for group in groups for each in group):
            if sequence in wanted:
                wanted[sequence] += range(len(tokens), len(tokens) + len(run))
            elif start + len(run) == len(sequence.tokens):
                self.sequences.append(sequence)
                wanted[sequence] = [len(tokens) + len(run) - 1]
            tokens += run
            positions += range(start, start + len(run))
            rows += [sequence.row] * len(run)
        packed = torch.tensor([tokens, positions, rows]).to(device)
        self.tokens, self.positions = packed[:1], packed[1:2]
        self._rows = packed[2]
        self.sampled: torch.Tensor | None = None
        if groups:
            places = [place for sequence in self.sequences for place in wanted[sequence]]
            self.sampled = torch.tensor(places, dtype=torch.long).to(device)
        self._writes: list[_Write] = []
        self._decodes: list[_Decode] = []
        self._prefills: list[_Prefill] = []
        start = 0
        for tier in decoding:
            stop = start + len(tier.decoding)
            self._write(tier, start, stop)
            keys = _aligned(max(positions[start:stop]) + 1, tier)
            self._decodes.append(_Decode(tier, start, stop, keys, self.positions[0, start:stop]))
            start = stop
        for group in groups:
            stop = start + sum(len(run.tokens) for run in group)
            prefill = _prefill(group, start, stop, device)
            self._write(prefill.tier, start, stop)
            self._prefills.append(prefill)
            start = stop

    def _write(self, tier: Tier[Sequence], start: int, stop: int) -> None:
        heads = torch.arange(tier.shape.heads, device=self._rows.device)
        rows, positions = self._rows[start:stop, None], self.positions[0, start:stop, None]
        index = ((rows * tier.shape.heads + heads) * tier.length + positions).flatten()
        self._writes.append(_Write(tier, start, stop, index))

    def attend(self, call: LayerCall) -> torch.Tensor:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value))
        for write in self._writes:
            write.store(call.layer, key, value)
        parts = [decode.attend(call, query) for decode in self._decodes]
        parts += [prefill.attend(call, query, key, value) for prefill in self._prefills]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _aligned(keys: int, tier: Tier[Sequence]) -> int:
    """Some kernels want masks whose rows are multiples of eight; a tier's length is one."""
    return min(-(-keys // 8) * 8, tier.length)


def _drafts(sequences: Iterable[Sequence]) -> Iterator[TokenRun]:
    return (TokenRun(each, each.kv_length + 1, each.draft) for each in sequences if each.draft)


def _prefills(chunks: Iterable[tuple[Sequence, int]]) -> Iterator[TokenRun]:
    for sequence, size in chunks:
        start = sequence.kv_length
        yield TokenRun(sequence, start, sequence.tokens[start : start + size])


def _batches(runs: Iterable[TokenRun]) -> list[list[TokenRun]]:
    """Runs that share an attention call: of one tier, all fresh or none, padded to one another at little cost."""

    def kind(run: TokenRun) -> tuple[int, bool]:
        assert run.sequence.tier is not None
        return run.sequence.tier.length, run.start > 0

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
    tier = group[0].sequence.tier
    assert tier is not None
    sizes = torch.tensor([len(run.tokens) for run in group])
    begins = torch.tensor([run.start for run in group])
    longest = int(sizes.max())
    offsets = torch.arange(longest)
    positions = begins[:, None] + offsets
    padded = packed = None
    if int(sizes.sum()) < len(group) * longest:
        real = offsets < sizes[:, None]
        firsts = start + sizes.cumsum(0) - sizes
        padded = (firsts[:, None] + torch.where(real, offsets, 0)).flatten().to(device)
        packed = real.flatten().nonzero()[:, 0].to(device)
    fresh = not bool(begins.any())
    rows = None if fresh else _side_by_side([run.sequence.row for run in group], device)
    keys = longest if fresh else _aligned(int((begins + sizes).max()), tier)
    return _Prefill(tier, start, stop, len(group), longest, keys, positions.to(device), rows, padded, packed)


def _side_by_side(rows: list[int], device: torch.device) -> torch.Tensor | slice:
    """Ascending `rows` as a slice, which copies nothing, if none is missing between them."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows).to(device)
