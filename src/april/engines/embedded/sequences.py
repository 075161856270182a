"""The sequences that the embedded engine holds, and which of them have rows of the KV cache.

Invariants:
- every sequence in flight is either waiting or admitted, and at most `slots` are admitted; they are admitted in the
  order of submission, and a preempted sequence returns to the front of the queue;
- an admitted sequence decodes, prefills, or waits for a `leader` that was admitted before it;
- the sequences that need the KV cache most give it up last: parked ones go first, then waiting ones, then the youngest
  admitted one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable
from itertools import chain

import torch

from april.engines.embedded.kv_cache import KVCache, Tier
from april.engines.embedded.sequence import Sequence
from april.rollout.sampling import FinishReason


class Sequences:
    """Sequences in flight, and parked ones: those of interrupted samples whose keys and values are kept.

    Args:
        cache: rows of keys and values.
        slots: sequences that are admitted at a time.
    """

    def __init__(self, cache: KVCache[Sequence], slots: int) -> None:
        self.cache = cache
        self.in_flight: dict[str, Sequence] = {}
        self.admitted: dict[Sequence, None] = {}
        self.parked: dict[str, Sequence] = {}
        """The first one gives up its row first."""
        self.epoch = 0
        """Number of weight updates: rows of different epochs share no prompts."""
        self._slots = slots
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._following: list[Sequence] = []
        """Admitted sequences that wait for their leader's prompt."""
        self._residents: dict[tuple[int, ...], dict[Sequence, None]] = {}
        """Sequences with a row, by prompt."""

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences that decode, tier by tier, in the order of their rows."""
        return [sequence for tier in self.cache.tiers for sequence in tier.decoding]

    def add(self, sequence: Sequence) -> Sequence:
        """Queue a sequence, as the parked one of its sample where there is one; return the one that is queued."""
        parked = self.parked.pop(sequence.id, None)
        if parked is not None:
            self._unregister(parked)
            parked.resume(sequence)
            self._register(parked)
            sequence = parked
        self.in_flight[sequence.id] = sequence
        self._waiting.append(sequence)
        return sequence

    @torch.inference_mode()
    def stop(self, sample_ids: Container[str]) -> Collection[Sequence]:
        """Park those of the named sequences that have keys and values; return all that were in flight."""
        stopped = {self.in_flight.pop(id): None for id in list(self.in_flight) if id in sample_ids}
        for tier in self.cache.tiers:
            tier.hold_those(stopped)
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in stopped)
        self.admitted = {sequence: None for sequence in self.admitted if sequence not in stopped}
        self._prefilling = [sequence for sequence in self._prefilling if sequence not in stopped]
        self._following = [sequence for sequence in self._following if sequence not in stopped]
        self._find_leaders(stopped)
        for sequence in stopped:
            sequence.leader = None
            if sequence.kv_length > 0:
                self.parked[sequence.id] = sequence
            elif sequence.tier is not None:
                self._release(sequence)
        return stopped

    def _find_leaders(self, stopped: Container[Sequence]) -> None:
        """Have the first follower of each stopped leader compute the prompt for the leader's other followers."""
        leaders: dict[Sequence, Sequence] = {}
        waiting, self._following = self._following, []
        for sequence in waiting:
            if sequence.leader is not None and sequence.leader in stopped:
                old, sequence.leader = sequence.leader, leaders.get(sequence.leader)
                if sequence.leader is None:
                    leaders[old] = sequence
                    self._start(sequence)
                    continue
            self._following.append(sequence)

    def drop(self, sample_ids: Iterable[str]) -> None:
        """Give up the rows of parked sequences."""
        for sample_id in sample_ids:
            sequence = self.parked.pop(sample_id, None)
            if sequence is not None:
                self._release(sequence)

    def move_to(self, cache: KVCache[Sequence]) -> None:
        """Give up all rows, and admit the sequences in flight again, into another cache; no token is lost."""
        for sequence in (*self.parked.values(), *self.in_flight.values()):
            sequence.lose_cache()
        self._waiting.extendleft(reversed(self.admitted))
        for held in (self.parked, self._residents, self.admitted, self._prefilling, self._following):
            held.clear()
        self.cache = cache

    def admit(self) -> None:
        """Give decoding sequences whose rows are full longer ones, then admit waiting sequences."""
        for sequence in [each for each in self.decoding if each.room < 0]:
            self._grow(sequence)
        while self._waiting and len(self.admitted) < self._slots:
            sequence = self._waiting[0]
            if not self._seat(sequence):
                break
            self._waiting.popleft()
            self.admitted[sequence] = None
            if sequence.leader is not None:
                self._following.append(sequence)
            else:
                self._start(sequence)

    def chunks(self, tokens: int) -> list[tuple[Sequence, int]]:
        """Return the sequences that prefill in the next pass, each with its share of at most `tokens` tokens."""
        chunks = []
        for sequence in self._prefilling:
            if tokens == 0:
                break
            size = min(sequence.missing, tokens)
            chunks.append((sequence, size))
            tokens -= size
        return chunks

    def draft(self, tokens: int) -> None:
        """Draft at most `tokens` tokens for the next pass: of decoding sequences that repeat a response under newer
        weights, what they contained before."""
        for sequence in self.decoding:
            if sequence.replay:
                place = len(sequence.tokens)
                count = min(sequence.room, sequence.left, tokens)
                sequence.draft = sequence.replay[place : place + count]
                tokens -= len(sequence.draft)

    def prefilled(self, chunks: Iterable[tuple[Sequence, int]]) -> None:
        """Record what a pass has prefilled, and copy prompts that are ready to the sequences that wait for them."""
        for sequence, size in chunks:
            sequence.kv_length += size
        self._lead()

    def decode_prefilled(self) -> None:
        """Have sequences decode that only lack the last token."""
        prefilling = []
        for sequence in self._prefilling:
            if sequence.finish is not None:
                continue
            if sequence.missing > 1:
                prefilling.append(sequence)
            else:
                _tier(sequence).decode(sequence)
        self._prefilling = prefilling

    def end(self, sequence: Sequence) -> None:
        """Take a finished sequence out; park it if another turn may follow."""
        del self.in_flight[sequence.id], self.admitted[sequence]
        if sequence.sampling.max_turns and sequence.finish is FinishReason.STOP:
            _tier(sequence).hold(sequence)
            self.parked[sequence.id] = sequence
        else:
            self._release(sequence)

    def _start(self, sequence: Sequence) -> None:
        if sequence.missing == 1:
            _tier(sequence).decode(sequence)
        else:
            self._prefilling.append(sequence)

    def _seat(self, sequence: Sequence) -> bool:
        """Give `sequence` a row that holds its tokens; return False if it has to wait for one."""
        needed = self.cache.tier_for(sequence.longest)
        if sequence.tier is not None and sequence.tier.length >= needed.length:
            return True
        # Without this reserve a sequence would be admitted into the room that another one needs in the next pass.
        reserve = self.cache.growth()
        while not self.cache.fits(needed, reserve):
            if not self._evict(sequence):
                return False
        if sequence.tier is not None:
            self.cache.outgrow(sequence, needed)
        else:
            self._place(sequence, needed)
        return True

    def _place(self, sequence: Sequence, tier: Tier[Sequence]) -> None:
        """Give a sequence its first row, with its prompt from a sequence that has computed it or is to compute it."""
        self.cache.place(sequence, tier)
        sequence.kv_epoch = self.epoch
        shared = len(sequence.prompt) - 1
        for other in self._residents.get(sequence.prompt, ()) if shared else ():
            if other.kv_epoch != self.epoch:
                continue
            if other.kv_length >= shared:
                self._copy_prompt(other, sequence)
                break
            if other in self.admitted and other.leader is None:
                sequence.leader = other
        self._register(sequence)

    def _copy_prompt(self, source: Sequence, sequence: Sequence) -> None:
        sequence.leader = None
        sequence.kv_length = len(sequence.prompt) - 1
        _tier(sequence).copy(source, sequence.row, sequence.kv_length)

    def _lead(self) -> None:
        """Copy prompts that have become ready to the sequences that wait for them."""
        following = []
        for sequence in self._following:
            leader = sequence.leader
            assert leader is not None
            if leader.kv_length < len(sequence.prompt) - 1:
                following.append(sequence)
                continue
            self._copy_prompt(leader, sequence)
            self._start(sequence)
        self._following = following

    def _evict(self, keep: Sequence) -> bool:
        """Take the row of a sequence that is not admitted: of the one parked first, else of the last one in the queue.

        Returns:
            Whether there was one. `keep` loses its row only if nothing is admitted.
        """
        for sequence in chain(self.parked.values(), reversed(self._waiting)):
            if sequence.tier is None or sequence is keep:
                continue
            self._release(sequence)
            self.parked.pop(sequence.id, None)
            return True
        if not self.admitted and keep.tier is not None:
            self._release(keep)
            return True
        return False

    def _grow(self, sequence: Sequence) -> None:
        """Move a decoding sequence whose row is full to a longer one, if need be at the cost of younger sequences."""
        if sequence not in self.admitted:
            return
        longer = self.cache.tier_for(sequence.longest)
        while not self.cache.fits(longer):
            if self._evict(sequence):
                continue
            youngest = next(reversed(self.admitted))
            self._preempt(youngest)
            if youngest is sequence:
                return
        self.cache.outgrow(sequence, longer)

    def _preempt(self, sequence: Sequence) -> None:
        """Return an admitted sequence to the front of the queue. It keeps its tokens and loses its row."""
        del self.admitted[sequence]
        for working in (self._prefilling, self._following):
            if sequence in working:
                working.remove(sequence)
        sequence.leader = None
        self._release(sequence)
        self._waiting.appendleft(sequence)

    @torch.inference_mode()
    def _release(self, sequence: Sequence) -> None:
        _tier(sequence).remove(sequence)
        sequence.kv_length = 0
        self._unregister(sequence)

    def _register(self, sequence: Sequence) -> None:
        self._residents.setdefault(sequence.prompt, {})[sequence] = None

    def _unregister(self, sequence: Sequence) -> None:
        residents = self._residents[sequence.prompt]
        del residents[sequence]
        if not residents:
            del self._residents[sequence.prompt]


def _tier(sequence: Sequence) -> Tier[Sequence]:
    assert sequence.tier is not None
    return sequence.tier
