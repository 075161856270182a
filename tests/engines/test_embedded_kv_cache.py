"""Rows of the KV cache: no sequence that moves, grows, pauses or leaves changes keys and values of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from april.engines.embedded.kv_cache import KVCache, bucket_lengths
from april.engines.embedded.kv_shape import KVShape
from april.engines.embedded.sequence import Sequence
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.sample import Sample

SHAPE = KVShape(layers=2, heads=1, key_size=3, value_size=2)
CONTEXT = 200


def content(sequence: Sequence, size: int) -> torch.Tensor:
    """What the sequence, and no other, has at each position: [layers, heads, kv_length, size]."""
    marks = torch.arange(sequence.kv_length, dtype=torch.float64) + 1000 * int(sequence.id.rpartition(".")[2])
    return marks[:, None].expand(SHAPE.layers, SHAPE.heads, -1, size)


class Rows(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        budget = 14 * 96 * SHAPE.bytes(torch.float64)
        self.cache = KVCache(SHAPE, CONTEXT, budget, torch.float64, torch.device("cpu"))
        self.decoding: list[Sequence] = []
        self.held: list[Sequence] = []
        self.born = 0

    def write(self, sequence: Sequence, length: int) -> None:
        sequence.kv_length = length
        assert sequence.bucket is not None
        sequence.bucket.keys[:, sequence.row, :, :length] = content(sequence, SHAPE.key_size)
        sequence.bucket.values[:, sequence.row, :, :length] = content(sequence, SHAPE.value_size)

    @rule(length=st.integers(1, CONTEXT))
    def place(self, length: int) -> None:
        bucket = self.cache.bucket_for(length)
        if self.cache.fits(bucket):
            self.born += 1
            sequence = Sequence.of(Sample(0, self.born, (1,), SamplingParams(), self.born), [1], CONTEXT, frozenset())
            self.cache.place(sequence, bucket)
            self.write(sequence, length)
            self.held.append(sequence)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        sequence = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        sequence.bucket.start_decoding(sequence)  # type: ignore[union-attr]
        self.decoding.append(sequence)

    @precondition(lambda self: self.held or self.decoding)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run in (self.held, self.decoding) if run]))
        sequence = run.pop(data.draw(st.integers(0, len(run) - 1)))
        sequence.bucket.remove(sequence)  # type: ignore[union-attr]

    @precondition(lambda self: self.held or self.decoding)
    @rule(data=st.data(), extra=st.integers(1, 100))
    def grow(self, data: st.DataObject, extra: int) -> None:
        sequence = data.draw(st.sampled_from([*self.held, *self.decoding]))
        length = min(CONTEXT, sequence.kv_length + extra)
        bucket = self.cache.bucket_for(length)
        if bucket is not sequence.bucket:
            if not self.cache.fits(bucket):
                return
            self.cache.move_to_bucket(sequence, bucket)
        self.write(sequence, length)

    @rule(data=st.data(), everyone=st.booleans())
    def stop_decoding(self, data: st.DataObject, everyone: bool) -> None:
        keep = 0 if everyone else data.draw(st.integers(0, len(self.decoding)))
        staying = data.draw(st.permutations(self.decoding))[:keep]
        stopped = [sequence for sequence in self.decoding if sequence not in staying]
        for bucket in self.cache.buckets:
            bucket.stop_decoding(stopped)
        self.held += stopped
        self.decoding = staying

    @rule()
    def release(self) -> None:
        self.cache.release()
        assert self.cache.allocated_bytes == self.cache.used_bytes

    @invariant()
    def everyone_has_what_is_theirs(self) -> None:
        for sequence in [*self.held, *self.decoding]:
            bucket = sequence.bucket
            assert bucket is not None
            assert bucket.owners[sequence.row] is sequence
            assert sequence.decoding == (sequence in self.decoding)
            span = slice(0, sequence.kv_length)
            assert torch.equal(bucket.keys[:, sequence.row, :, span], content(sequence, SHAPE.key_size))
            assert torch.equal(bucket.values[:, sequence.row, :, span], content(sequence, SHAPE.value_size))

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.cache.used_bytes <= self.cache.allocated_bytes <= self.cache.budget
        assert sum(bucket.used for bucket in self.cache.buckets) == len(self.held) + len(self.decoding)


Rows.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRows = Rows.TestCase


def test_memory_never_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that grow, shrink and move, and pools that grow: all that PyTorch holds at one time on the device."""
    budget, shape = 40 * 64 * 80, KVShape(layers=2, heads=2, key_size=3, value_size=2)
    with Allocations() as made:
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: made.elsewhere(tensor))
        cache: KVCache[Sequence] = KVCache(shape, 400, budget, torch.float32, torch.device("cpu"))
        placed = []
        for number, length in enumerate([60, 90, 60, 120, 60, 380, 90, 60, 60, 250, 60, 60, 60, 60, 120, 60, 380]):
            sequence = Sequence.of(Sample(0, number, (1,), SamplingParams(), number), [1], 400, frozenset())
            bucket = cache.bucket_for(length)
            while not cache.fits(bucket):
                gone = placed.pop(0)
                gone.bucket.remove(gone)
            cache.place(sequence, bucket)
            sequence.kv_length = length
            placed.append(sequence)
    assert cache.peak_bytes > budget * 0.9
    assert budget * 0.9 < made.most <= budget * 1.05, "temporary copies of a few tokens are beside it"


def test_pools_grow_with_their_rows_and_return_memory() -> None:
    budget = 1 << 20
    cache: KVCache[Sequence] = KVCache(SHAPE, CONTEXT, budget, torch.float64, torch.device("cpu"))
    token = SHAPE.bytes(torch.float64)

    def pools() -> int:
        return sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))

    def place(seed: int) -> Sequence:
        sequence = Sequence.of(Sample(0, seed, (1,), SamplingParams(), seed), [1], CONTEXT, frozenset())
        cache.place(sequence, cache.buckets[0])
        return sequence

    assert pools() == 0
    first = place(1)
    assert 64 * token <= pools() <= 3 * 64 * token, "one row of the shortest bucket, whatever the budget"
    many = [first, *(place(seed) for seed in range(2, 40))]
    grown = pools()
    assert 39 * 64 * token <= grown <= 3 * 39 * 64 * token
    for sequence in many:
        sequence.bucket.remove(sequence)  # type: ignore[union-attr]
    cache.release()
    assert pools() == 0
    place(1)
    assert pools() == grown, "as before, and in one step"


class Allocations(TorchDispatchMode):
    """Bytes of tensors that exist at one time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self._counts = True

    def elsewhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to memory of another device."""
        self._counts = False
        copy = tensor.clone()
        self._counts = True
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out) and self._counts and not func.is_view:
            storage = out.untyped_storage()
            if not any(own.cdata == storage._cdata for own, _ in self._alive):
                self._alive.append((StorageWeakRef(storage), storage.nbytes()))
            self._alive = [(own, size) for own, size in self._alive if not own.expired()]
            self.most = max(self.most, sum(size for _, size in self._alive))
        return out


def test_buckets_grow_by_halves_and_thirds_up_to_the_context() -> None:
    assert bucket_lengths(20) == [24]
    assert bucket_lengths(64) == [64]
    assert bucket_lengths(400) == [64, 96, 128, 192, 256, 384, 400]
