"""Attention over the rows of one length bucket, for devices without a kernel that computes all runs in one call."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from april.engines.embedded.attention import LayerCall
from april.engines.embedded.length_bucket import LengthBucket
from april.engines.embedded.sequence import Sequence
from april.engines.embedded.token_runs import TokenRun
from april.engines.embedded.upload import upload
from april.engines.kernels import attend, causal_mask

_KEYS_MULTIPLE = 8
"""Some kernels need masks whose rows are multiples of this; the length of a bucket is one."""


class DecodeAttention:
    """Attention of tokens `start` to `stop` of a pass: one of each decoding sequence of `bucket`.

    Args:
        positions: positions of the tokens, [sequences].
        longest: keys of the longest sequence.
    """

    def __init__(
        self, bucket: LengthBucket[Sequence], start: int, stop: int, longest: int, positions: torch.Tensor
    ) -> None:
        keys = _aligned(longest, bucket)
        self._tokens = slice(start, stop)
        self._length = keys
        self._positions = positions[:, None]
        self._keys, self._values = bucket.layer_views(stop - start, keys)
        self._grouped = (stop - start, bucket.shape.heads, -1, bucket.shape.key_size)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, call: LayerCall, query: torch.Tensor) -> torch.Tensor:
        layer, window = call.layer, call.window
        # Such a window hides no key. Layers with and without it then share one mask.
        if window is not None and window >= self._length:
            window = None
        mask = self._masks.get(window)
        if mask is None:
            mask = self._masks[window] = causal_mask(self._positions, self._length, window, query.dtype)
        # The query heads that share a KV head become its queries, so keys and values are never repeated.
        grouped = query[self._tokens].reshape(self._grouped)
        out = attend(grouped, self._keys[layer], self._values[layer], mask, call.scaling, call.softcap)
        return out.flatten(1, 2)


@dataclass(slots=True)
class PrefillAttention:
    """Attention of tokens `start` to `stop` of a pass: runs of several sequences of `bucket`, padded to the longest.

    Args:
        keys: number of keys of the longest sequence.
        positions: [runs, longest].
        rows: rows of the bucket to read keys and values from, a slice if they are adjacent; None if every run starts at
            position 0, so that the keys and values of the pass itself suffice.
        padded: [runs * longest], selects the tokens of the padded batch; None if nothing is padded.
        packed: [tokens], selects from the padded batch the tokens that are not padding; None if nothing is padded.
    """

    bucket: LengthBucket[Sequence]
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

    @classmethod
    def of(cls, batch: list[TokenRun], start: int, stop: int, device: torch.device) -> PrefillAttention:
        bucket = batch[0].bucket
        sizes = np.array([len(run.tokens) for run in batch])
        begins = np.array([run.start for run in batch])
        longest = int(sizes.max())
        offsets = np.arange(longest)
        positions = begins[:, None] + offsets
        padded = packed = None
        if sizes.sum() < len(batch) * longest:
            real = offsets < sizes[:, None]
            firsts = start + sizes.cumsum() - sizes
            # Padding repeats a run's first token. It stands behind the run's own tokens, so causality hides its keys.
            padded = upload((firsts[:, None] + np.where(real, offsets, 0)).flatten(), device)
            packed = upload(real.flatten().nonzero()[0], device)
        fresh = not bool(begins.any())
        rows = None if fresh else _adjacent([run.sequence.row for run in batch], device)
        keys = longest if fresh else _aligned(int((begins + sizes).max()), bucket)
        return cls(bucket, start, stop, len(batch), longest, keys, upload(positions, device), rows, padded, packed)

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            keys, values = self._batch(key), self._batch(value)
        else:
            keys = self.bucket.keys[call.layer][self.rows, :, : self.keys]
            values = self.bucket.values[call.layer][self.rows, :, : self.keys]
        out = attend(self._batch(query), keys, values, self._mask(call, query.dtype), call.scaling, call.softcap)
        flat = out.transpose(1, 2).reshape(self.runs * self.longest, query.shape[1], -1)
        return flat if self.packed is None else flat.index_select(0, self.packed)

    def _batch(self, tokens: torch.Tensor) -> torch.Tensor:
        picked = tokens[self.start : self.stop] if self.padded is None else tokens[self.padded]
        return picked.view(self.runs, self.longest, *picked.shape[1:]).transpose(1, 2)

    def _mask(self, call: LayerCall, dtype: torch.dtype) -> torch.Tensor | None:
        window = None if call.window is None or call.window >= self.keys else call.window
        # Queries and keys start at the same position, so `attend` needs no mask; PyTorch's flash kernel accepts none.
        if self.rows is None and window is None and call.softcap is None:
            return None
        if window not in self.masks:
            self.masks[window] = causal_mask(self.positions, self.keys, window, dtype)
        return self.masks[window]


def _adjacent(rows: list[int], device: torch.device) -> torch.Tensor | slice:
    """Return ascending `rows` as a slice, with which indexing copies nothing, if none is missing between them."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return upload(np.array(rows), device)


def _aligned(keys: int, bucket: LengthBucket[Sequence]) -> int:
    return min(-(-keys // _KEYS_MULTIPLE) * _KEYS_MULTIPLE, bucket.length)
