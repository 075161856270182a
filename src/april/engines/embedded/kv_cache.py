"""Keys and values of every sequence, in tiers of similar length.

Invariants:
- a tier is one pair of tensors [layers, rows, KV heads, length, head size]; a sequence has one row of one tier, long
  enough for its tokens, and moves to a longer tier when it outgrows it;
- rows of a tier are in three runs: decoding sequences, held ones (prefilling, waiting or parked), free rows. So decode
  attention reads views and gathers nothing, and a lone long sequence makes nobody else's attention longer;
- rows in use never take more than `budget` bytes, and allocated ones never do once `place` has returned.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch

_SHORTEST = 64
_FEWEST_ROWS = 8


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves in the cache of each of `layers` layers."""

    layers: int
    heads: int
    key_size: int
    value_size: int

    def bytes(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * dtype.itemsize


@dataclass(slots=True, eq=False, kw_only=True)
class Resident:
    """What has a row: number `row` of `tier`, where keys and values of its first `kv_length` tokens stand."""

    kv_length: int = 0
    tier: Tier[Any] | None = None
    row: int = -1


R = TypeVar("R", bound=Resident)


class Tier(Generic[R]):
    """Rows of one length."""

    def __init__(self, length: int, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        self.length = length
        self.shape = shape
        self.row_bytes = length * shape.bytes(dtype)
        self.keys = torch.zeros(shape.layers, 0, shape.heads, length, shape.key_size, dtype=dtype, device=device)
        self.values = torch.zeros(shape.layers, 0, shape.heads, length, shape.value_size, dtype=dtype, device=device)
        self.decoding: list[R] = []
        self.held: list[R] = []

    @property
    def used(self) -> int:
        return len(self.decoding) + len(self.held)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    def resize(self, rows: int) -> None:
        """Allocate `rows` rows and keep what the used ones hold."""
        used = self.used
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_empty(old.shape[0], rows, *old.shape[2:])
            new[:, :used].copy_(old[:, :used])
            setattr(self, name, new)

    def views(self, rows: int, length: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keys and values of each layer, [rows, KV heads, length, head size], of the first rows and positions."""
        return self.keys[:, :rows, :, :length].unbind(0), self.values[:, :rows, :, :length].unbind(0)

    def flat(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keys and values of each layer as [rows * KV heads * length, head size]."""
        return self.keys.flatten(1, 3).unbind(0), self.values.flatten(1, 3).unbind(0)

    def append(self, sequence: R) -> None:
        """Give `sequence` the first free row, held."""
        row = self.used
        # Masked positions still count as 0 times what is there, which must not be what is not a number.
        self.keys[:, row, :, sequence.kv_length :].zero_()
        self.values[:, row, :, sequence.kv_length :].zero_()
        sequence.tier, sequence.row = self, row
        self.held.append(sequence)

    def decode(self, sequence: R) -> None:
        """Move a held sequence to the end of the decoding run."""
        boundary = self.held[0]
        if boundary is not sequence:
            self._swap(boundary, sequence)
            self.held[sequence.row - len(self.decoding)] = sequence
            self.held[boundary.row - len(self.decoding)] = boundary
        self.held.pop(0)
        self.decoding.append(sequence)

    def hold(self, sequence: R) -> None:
        """Move a decoding sequence to the front of the held ones; a sequence that is held already stays."""
        if sequence.row >= len(self.decoding):
            return
        last = self.decoding[-1]
        if last is not sequence:
            index = sequence.row
            self._swap(last, sequence)
            self.decoding[index] = last
        self.decoding.pop()
        self.held.insert(0, sequence)

    def hold_those(self, sequences: Container[R]) -> None:
        """Move those of `sequences` that decode to the held ones; nothing is copied if all do."""
        staying = [sequence for sequence in self.decoding if sequence not in sequences]
        if not staying:
            self.held = self.decoding + self.held
            self.decoding = []
        elif len(staying) < len(self.decoding):
            for sequence in [sequence for sequence in self.decoding if sequence in sequences]:
                self.hold(sequence)

    def remove(self, sequence: R) -> None:
        """Free the row of `sequence`; the last of its run, and the last held one, fill the holes."""
        hole = sequence.row
        if hole < len(self.decoding):
            last = self.decoding.pop()
            if last is not sequence:
                self.decoding[hole] = last
                self._move(last, hole)
            hole = len(self.decoding)
            if self.held:
                filler = self.held.pop()
                self.held.insert(0, filler)
                self._move(filler, hole)
        else:
            last = self.held.pop()
            if last is not sequence:
                self.held[hole - len(self.decoding)] = last
                self._move(last, hole)
        sequence.tier, sequence.row = None, -1

    def copy(self, source: R, row: int, length: int) -> None:
        """Copy the first `length` keys and values of `source`, wherever it is, to `row`."""
        if length == 0:
            return
        tier = source.tier
        assert tier is not None
        self.keys[:, row, :, :length].copy_(tier.keys[:, source.row, :, :length])
        self.values[:, row, :, :length].copy_(tier.values[:, source.row, :, :length])

    def _move(self, sequence: R, row: int) -> None:
        self.copy(sequence, row, sequence.kv_length)
        sequence.row = row

    def _swap(self, a: R, b: R) -> None:
        for tensor in (self.keys, self.values):
            kept = tensor[:, a.row, :, : a.kv_length].clone()
            tensor[:, a.row, :, : b.kv_length].copy_(tensor[:, b.row, :, : b.kv_length])
            tensor[:, b.row, :, : a.kv_length].copy_(kept)
        a.row, b.row = b.row, a.row


class KVCache(Generic[R]):
    """Tiers up to `context_length` tokens within `budget` bytes.

    Growing a tier needs room for its new rows beside the old ones for a moment, keys and values in turn.
    """

    def __init__(
        self, shape: KVShape, context_length: int, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.budget = budget
        self.peak_bytes = 0
        """The most that was allocated so far."""
        self.tiers: list[Tier[R]] = [Tier(length, shape, dtype, device) for length in tier_lengths(context_length)]

    def tier_for(self, length: int) -> Tier[R]:
        return next(tier for tier in self.tiers if tier.length >= length)

    @property
    def used_bytes(self) -> int:
        return sum(tier.used * tier.row_bytes for tier in self.tiers)

    @property
    def allocated_bytes(self) -> int:
        return sum(tier.rows * tier.row_bytes for tier in self.tiers)

    def growth(self) -> int:
        """Bytes that a decoding sequence asks for when it next outgrows its tier, at most."""
        return max((b.row_bytes for a, b in pairwise(self.tiers) if a.decoding), default=0)

    def fits(self, tier: Tier[R], reserve: int = 0) -> bool:
        return self.used_bytes + tier.row_bytes + reserve <= self.budget

    def place(self, sequence: R, tier: Tier[R]) -> None:
        """Give `sequence` a row of `tier`, held; the caller has seen that it `fits`."""
        if tier.used == tier.rows:
            self._grow(tier)
        tier.append(sequence)

    def outgrow(self, sequence: R, tier: Tier[R]) -> None:
        """Move `sequence`, with what it has in the cache, to a row of `tier`; it keeps decoding if it was."""
        old = sequence.tier
        assert old is not None
        decoding = sequence.row < len(old.decoding)
        if tier.used == tier.rows:
            self._grow(tier)
        tier.copy(sequence, tier.used, sequence.kv_length)
        old.remove(sequence)
        tier.append(sequence)
        if decoding:
            tier.decode(sequence)

    def release(self) -> None:
        """Return the memory of rows that are not used."""
        for tier in self.tiers:
            if tier.rows > tier.used:
                tier.resize(tier.used)

    def _grow(self, tier: Tier[R]) -> None:
        wanted = max(_FEWEST_ROWS, tier.used + 1, tier.used * 3 // 2)
        if self.allocated_bytes + (wanted - tier.rows) * tier.row_bytes > self.budget:
            self.release()
            affordable = (self.budget - self.allocated_bytes) // tier.row_bytes
            wanted = min(wanted, tier.rows + affordable)
        assert wanted > tier.used
        tier.resize(wanted)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)


def tier_lengths(context_length: int) -> list[int]:
    """Powers of two, and what lies half way between them, up to the first that holds `context_length` tokens."""
    lengths = [_SHORTEST]
    while lengths[-1] < context_length:
        last = lengths[-1]
        lengths.append(last * 3 // 2 if last & (last - 1) == 0 else last * 4 // 3)
    return [*lengths[:-1], min(lengths[-1], -(-context_length // 8) * 8)]
