"""Keys and values of every sequence, in length buckets.

Invariants:
- keys and values each have one pool for all buckets, [layers, KV heads · tokens, head size]: so a layer writes the
  tokens of a pass with one call, and a kernel that takes begins and lengths reads all buckets with one;
- a bucket is a part of the pools; a sequence has one row of one bucket, long enough for its tokens, and moves to a
  longer bucket when it outgrows it;
- the pools never take more than `budget` bytes. Their size is the smallest 1/2^k of the budget that holds the rows in
  use; buckets grow inside the pools by moving the longer buckets behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic

import torch

from april.engines.embedded.kv_shape import KVShape
from april.engines.embedded.length_bucket import LengthBucket, R

_SHORTEST = 64
_FEWEST_ROWS = 8
_SPARE = 4
"""The pools have room for one more row, and for a spare 1/4 of the tokens that they hold."""
_MOVED_AT_ONCE = 256
"""Tokens of a KV head that are moved through a temporary copy, where a bucket moves by fewer."""


class KVCache(Generic[R]):
    """Buckets up to `context_length` tokens within `budget` bytes, which are allocated as rows need them."""

    def __init__(
        self, shape: KVShape, context_length: int, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.budget = budget
        self.peak_bytes = 0
        """Largest size of all allocated rows so far."""
        self.buckets: list[LengthBucket[R]] = [
            LengthBucket(length, shape, dtype) for length in bucket_lengths(context_length)
        ]
        self._most_tokens = budget // shape.bytes(dtype)
        self._tokens = 0
        """Size of the pools, which they are allocated with again after a release."""
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._pools = [self._pool(0, size) for size in (shape.key_size, shape.value_size)]
        self._map_pools()

    def _pool(self, tokens: int, size: int) -> torch.Tensor:
        return torch.empty(self.shape.layers, self.shape.heads * tokens, size, **self._options)

    def _map_pools(self) -> None:
        self.keys, self.values = (pool.unbind(0) for pool in self._pools)
        for bucket in self.buckets:
            bucket.map_pools(*self._pools)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pools have memory for now."""
        return self.keys[0].shape[0] // self.shape.heads

    def _reserve(self, tokens: int) -> None:
        """Enlarge the pools if they lack room for `tokens` tokens behind the used rows and for the spare share."""
        held = sum(bucket.used * bucket.length for bucket in self.buckets) + tokens
        size = self._most_tokens
        # Halves of the budget: as the cache grows, the pools are allocated and copied only a few times.
        while size // 2 >= held + held // _SPARE:
            size //= 2
        # Never smaller than before: after a release the pools return to their former size in one step.
        self._tokens = max(size, self._tokens)
        if self._tokens > self.pool_tokens:
            self._resize(self._tokens)

    def _resize(self, tokens: int) -> None:
        """Allocate each pool again with `tokens` tokens; used rows keep their places.

        If a copy of one pool, in addition to both pools, exceeds the budget, it is made on the host. If memory runs
        out, the contents of the cache are lost.
        """
        used = max((bucket.offset + bucket.used * bucket.length for bucket in self.buckets if bucket.used), default=0)
        sizes = [pool.shape[2] for pool in self._pools]
        on_host = used and tokens + self.pool_tokens * max(sizes) / sum(sizes) > self._most_tokens
        del self.keys, self.values
        for bucket in self.buckets:
            del bucket.keys, bucket.values  # views keep the memory of the pools
        for size in sizes:
            # One pool at a time: the memory of the old pool is freed before the next new pool is allocated.
            kept = self._pools.pop(0)[:, : used * self.shape.heads]
            if on_host:
                kept = kept.cpu()
            pool = self._pool(tokens, size)
            pool[:, : kept.shape[1]].copy_(kept)
            self._pools.append(pool)
        self._map_pools()

    def bucket_for(self, length: int) -> LengthBucket[R]:
        return next(bucket for bucket in self.buckets if bucket.length >= length)

    @property
    def used_bytes(self) -> int:
        return sum(bucket.used * bucket.row_bytes for bucket in self.buckets)

    @property
    def allocated_bytes(self) -> int:
        return sum(bucket.capacity * bucket.row_bytes for bucket in self.buckets)

    @property
    def num_decoding(self) -> int:
        return sum(bucket.num_decoding for bucket in self.buckets)

    def largest_growth(self) -> int:
        """Bytes that a decoding sequence needs, at most, when it next outgrows its bucket."""
        return max((longer.row_bytes for bucket, longer in pairwise(self.buckets) if bucket.num_decoding), default=0)

    def fits(self, bucket: LengthBucket[R], reserve: int = 0) -> bool:
        return self.used_bytes + bucket.row_bytes + reserve <= self.budget

    def place(self, sequence: R, bucket: LengthBucket[R]) -> None:
        """Give `sequence` a held row of `bucket`; the caller has checked that it `fits`."""
        if bucket.used == bucket.capacity:
            self._grow(bucket)
        bucket.add(sequence)

    def move_to_bucket(self, sequence: R, bucket: LengthBucket[R]) -> None:
        """Move keys and values of `sequence` to a row of `bucket`; a sequence that decodes continues to decode."""
        old, decoding = sequence.bucket, sequence.decoding
        assert old is not None
        if bucket.used == bucket.capacity:
            self._grow(bucket)
        # Copied before `remove`, which reuses the old row. `add` then takes row `used` and clears only what follows.
        bucket.copy(sequence, bucket.used, sequence.kv_length)
        old.remove(sequence)
        bucket.add(sequence)
        if decoding:
            bucket.start_decoding(sequence)

    def release(self) -> None:
        """Free unused rows, and the memory of the pools if no row is used."""
        self._arrange([bucket.used for bucket in self.buckets])
        if not self.allocated_bytes:
            self._resize(0)

    def _grow(self, bucket: LengthBucket[R]) -> None:
        self._reserve(bucket.length)
        rows = {each: each.capacity for each in self.buckets}
        # Growth by half keeps growths rare: each moves all longer buckets.
        wanted = max(_FEWEST_ROWS, bucket.used + 1, bucket.used * 3 // 2)
        room = self.pool_tokens * self.shape.bytes(self._options["dtype"])
        if self.allocated_bytes + (wanted - bucket.capacity) * bucket.row_bytes > room:
            # The pools are too small for this: all buckets give up their free rows.
            rows = {each: each.used for each in self.buckets}
            wanted = min(wanted, bucket.used + (room - self.used_bytes) // bucket.row_bytes)
        assert wanted > bucket.used
        self._arrange([*(rows | {bucket: wanted}).values()])
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _arrange(self, rows: Sequence[int]) -> None:
        """Give bucket i `rows[i]` rows, one bucket behind the other, and move keys and values of the used rows."""
        sizes = (count * bucket.length for count, bucket in zip(rows, self.buckets, strict=True))
        targets = dict(zip(self.buckets, accumulate(sizes, initial=0), strict=False))
        # In this order no bucket moves onto another that has not moved yet.
        for bucket in self.buckets:
            if targets[bucket] < bucket.offset:
                self._move(bucket, targets[bucket])
        for bucket in reversed(self.buckets):
            if targets[bucket] > bucket.offset:
                self._move(bucket, targets[bucket])
        for bucket, count in zip(self.buckets, rows, strict=True):
            bucket.capacity = count
            bucket.map_pools(*self._pools)

    def _move(self, bucket: LengthBucket[R], offset: int) -> None:
        heads = self.shape.heads
        begin, distance = bucket.offset * heads, (offset - bucket.offset) * heads
        end = begin + bucket.used * bucket.length * heads
        size = max(abs(distance), _MOVED_AT_ONCE)
        parts = range(begin, end, size)
        # As memmove does: the part nearest to the target moves first, so none is overwritten before it has moved.
        for first in parts if distance < 0 else reversed(parts):
            last = min(first + size, end)
            for pool in self._pools:
                source = pool[:, first:last]
                overlap = size > abs(distance)
                pool[:, first + distance : last + distance].copy_(source.clone() if overlap else source)
        bucket.offset = offset


def bucket_lengths(context_length: int) -> list[int]:
    """Return powers of two and the midpoints between them, up to the first that holds `context_length` tokens."""
    lengths = [_SHORTEST]
    while lengths[-1] < context_length:
        last = lengths[-1]
        lengths.append(last * 3 // 2 if last & (last - 1) == 0 else last * 4 // 3)
    # A multiple of 8, as some kernels require of the rows of masks (`bucket_attention._KEYS_MULTIPLE`).
    return [*lengths[:-1], min(lengths[-1], -(-context_length // 8) * 8)]
