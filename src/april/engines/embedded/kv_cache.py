"""Keys and values of every sequence, in tiers of similar length.

Invariants:
- keys and values each have one pool for all tiers, [layers, KV heads · tokens, head size]: so a layer writes the tokens
  of a step with one call, and a kernel that takes begins and lengths reads all tiers with one;
- a tier is a part of the pool seen as [layers, rows, KV heads, length, head size]; a sequence has one row of one tier,
  long enough for its tokens, and moves to a longer tier when it outgrows it;
- rows of a tier are in three runs: decoding sequences, held ones (prefilling, waiting or parked), free rows. So decode
  attention reads views and gathers nothing, and a lone long sequence makes nobody else's attention longer;
- the pools never take more than `budget` bytes. They are the smallest of 1/2^k of it that hold the rows in use; tiers
  grow inside them, by moving the longer ones behind them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch

_SHORTEST = 64
_FEWEST_ROWS = 8
_SPARE = 4
"""The pools have room for one more row, and for one in so many of the tokens that they hold."""
_MOVED_AT_ONCE = 256
"""Tokens of a KV head that are moved through a temporary copy, where a tier moves by fewer."""


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
    """Rows of one length, from `offset` (in tokens) of the pool on."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, length: int, shape: KVShape, dtype: torch.dtype) -> None:
        self.length = length
        self.shape = shape
        self.row_bytes = length * shape.bytes(dtype)
        self.offset = 0
        self.rows = 0
        self.decoding: list[R] = []
        self.held: list[R] = []

    def see(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the tier's part of the pools."""
        begin, stop = (tokens * self.shape.heads for tokens in (self.offset, self.offset + self.rows * self.length))
        self.keys, self.values = (
            pool[:, begin:stop].unflatten(1, (self.rows, self.shape.heads, self.length)) for pool in (keys, values)
        )

    def begin(self, row: int) -> int:
        """Return the first place of `row` in the pool; KV head h begins h · `length` places behind it."""
        return (self.offset + row * self.length) * self.shape.heads

    @property
    def used(self) -> int:
        return len(self.decoding) + len(self.held)

    def views(self, rows: int, length: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keys and values of each layer, [rows, KV heads, length, head size], of the first rows and positions."""
        return self.keys[:, :rows, :, :length].unbind(0), self.values[:, :rows, :, :length].unbind(0)

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
    """Tiers up to `context_length` tokens within `budget` bytes, which are allocated as rows need them."""

    def __init__(
        self, shape: KVShape, context_length: int, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.budget = budget
        self.peak_bytes = 0
        """The most that rows of tiers took so far."""
        self.tiers: list[Tier[R]] = [Tier(length, shape, dtype) for length in tier_lengths(context_length)]
        self._most_tokens = budget // shape.bytes(dtype)
        self._tokens = 0
        """Size of the pools; while they are released, the size that they are allocated with again."""
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._pools = [self._pool(0, size) for size in (shape.key_size, shape.value_size)]
        self._see()

    def _pool(self, tokens: int, size: int) -> torch.Tensor:
        return torch.empty(self.shape.layers, self.shape.heads * tokens, size, **self._options)

    def _see(self) -> None:
        self.keys, self.values = (pool.unbind(0) for pool in self._pools)
        for tier in self.tiers:
            tier.see(*self._pools)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pools have memory for at the moment."""
        return self.keys[0].shape[0] // self.shape.heads

    def _reserve(self, tokens: int) -> None:
        """See that the pools have room for so many tokens beside the used rows, and some to spare."""
        held = sum(tier.used * tier.length for tier in self.tiers) + tokens
        size = self._most_tokens
        while size // 2 >= held + held // _SPARE:
            size //= 2
        self._tokens = max(size, self._tokens)
        if self._tokens > self.pool_tokens:
            self._resize(self._tokens)

    def _resize(self, tokens: int) -> None:
        """Give the pools another size, one after the other; used rows keep their places.

        A copy of one pool, beside both, may exceed the budget: then it is made on the host. Where memory runs out, what
        the cache held is lost.
        """
        used = max((tier.offset + tier.used * tier.length for tier in self.tiers if tier.used), default=0)
        sizes = [pool.shape[2] for pool in self._pools]
        on_host = used and tokens + self.pool_tokens * max(sizes) / sum(sizes) > self._most_tokens
        del self.keys, self.values
        for tier in self.tiers:
            del tier.keys, tier.values  # which keep the memory that they are views of
        for size in sizes:
            kept = self._pools.pop(0)[:, : used * self.shape.heads]
            if on_host:
                kept = kept.cpu()
            pool = self._pool(tokens, size)
            pool[:, : kept.shape[1]].copy_(kept)
            self._pools.append(pool)
        self._see()

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
        """Give up rows that are not used; return the memory if none is."""
        self._arrange([tier.used for tier in self.tiers])
        if not self.allocated_bytes:
            self._resize(0)

    def _grow(self, tier: Tier[R]) -> None:
        self._reserve(tier.length)
        rows = {each: each.rows for each in self.tiers}
        wanted = max(_FEWEST_ROWS, tier.used + 1, tier.used * 3 // 2)
        room = self.pool_tokens * self.shape.bytes(self._options["dtype"])
        if self.allocated_bytes + (wanted - tier.rows) * tier.row_bytes > room:
            rows = {each: each.used for each in self.tiers}
            wanted = min(wanted, tier.used + (room - self.used_bytes) // tier.row_bytes)
        assert wanted > tier.used
        self._arrange([*(rows | {tier: wanted}).values()])
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _arrange(self, rows: Sequence[int]) -> None:
        """Give every tier so many rows, one tier behind the other, and move what the used ones hold."""
        sizes = (count * tier.length for count, tier in zip(rows, self.tiers, strict=True))
        targets = dict(zip(self.tiers, accumulate(sizes, initial=0), strict=False))
        # In this order no tier moves onto another that has not moved yet.
        for tier in self.tiers:
            if targets[tier] < tier.offset:
                self._move(tier, targets[tier])
        for tier in reversed(self.tiers):
            if targets[tier] > tier.offset:
                self._move(tier, targets[tier])
        for tier, count in zip(self.tiers, rows, strict=True):
            tier.rows = count
            tier.see(*self._pools)

    def _move(self, tier: Tier[R], offset: int) -> None:
        heads = self.shape.heads
        begin, count, distance = (n * heads for n in (tier.offset, tier.used * tier.length, offset - tier.offset))
        size = max(abs(distance), _MOVED_AT_ONCE)
        parts = range(begin, begin + count, size)
        for first in parts if distance < 0 else reversed(parts):
            last = min(first + size, begin + count)
            for pool in self._pools:
                source = pool[:, first:last]
                overlap = size > abs(distance)
                pool[:, first + distance : last + distance].copy_(source.clone() if overlap else source)
        tier.offset = offset


def tier_lengths(context_length: int) -> list[int]:
    """Powers of two, and what lies half way between them, up to the first that holds `context_length` tokens."""
    lengths = [_SHORTEST]
    while lengths[-1] < context_length:
        last = lengths[-1]
        lengths.append(last * 3 // 2 if last & (last - 1) == 0 else last * 4 // 3)
    return [*lengths[:-1], min(lengths[-1], -(-context_length // 8) * 8)]
