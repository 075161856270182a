"""Decides which sequences are part of the next forward pass, and which hold rows of the KV cache.

Transitions between the states of a sequence:

    submit      new, or PAUSED    -> WAITING    at the end of the queue; a paused sequence brings its row
    _admit      WAITING           -> RUNNING    in the order of the queue, once a slot and a row are free
    _preempt    RUNNING           -> WAITING    at the front of the queue, without its row
    pause       WAITING, RUNNING  -> PAUSED     with its row, if it has keys and values; otherwise it is forgotten
    finish      RUNNING           -> FINISHED   without its row
                RUNNING           -> PAUSED     with its row, if another turn of the episode may follow

Invariants:
- every sequence in flight is either waiting or running, and at most `max_num_seqs` are running;
- a running sequence decodes, prefills, or waits for a `prefix_owner` that was admitted before it;
- the sequences that need the KV cache most give it up last: paused ones go first, then waiting ones, then the youngest
  running one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from itertools import chain
from typing import Any

import torch

from april.engines.embedded.kv_cache import KVCache
from april.engines.embedded.length_bucket import LengthBucket
from april.engines.embedded.sequence import Sequence, State
from april.images.model_inputs import Run
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.features import Feature


class BatchScheduler:
    """Sequences in flight, and paused sequences of interrupted samples, whose keys and values are kept.

    Args:
        cache: rows of keys and values.
        max_num_seqs: sequences that run at a time.
    """

    def __init__(self, cache: KVCache[Sequence], max_num_seqs: int) -> None:
        self.cache = cache
        self.in_flight: dict[str, Sequence] = {}
        """Waiting and running sequences, by sample id."""
        self.paused: dict[str, Sequence] = {}
        """Paused sequences with a row, by sample id. The first one gives up its row first."""
        self.epoch = 0
        """Number of weight updates. Rows of different epochs share no prompts."""
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}
        """In the order of admission."""
        self._prefix_index: dict[tuple[Any, ...], dict[Sequence, None]] = {}
        """Sequences with a row, by prompt and its images."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences that decode, bucket by bucket, in the order of their rows."""
        return [sequence for bucket in self.cache.buckets for sequence in bucket.decoding]

    # Transitions.

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. It takes over the row of the paused sequence of the same sample."""
        paused = self.paused.pop(sequence.id, None)
        if paused is not None:
            self._unregister(paused)
            # At least one token stays missing: the next token is sampled from the logits of the last.
            kept = paused.common_prefix(sequence, min(paused.kv_length, len(sequence.tokens) - 1))
            if sequence.routes is not None and paused.routes is not None:
                kept = sequence.routes.resume(paused.routes, kept)
            _bucket(paused).replace(paused, sequence, kept)
            # With on_update = "keep" the row may be of older weights, and must not be shared as a current one.
            sequence.kv_epoch = paused.kv_epoch
            self._register(sequence)
        sequence.state = State.WAITING
        self.in_flight[sequence.id] = sequence
        self._waiting.append(sequence)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            # First come, first served: later sequences with shorter rows must not overtake, or long ones starve.
            if not self._provide_row(sequence):
                return
            self._waiting.popleft()
            self._running[sequence] = None
            sequence.state = State.RUNNING

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence]
        sequence.state, sequence.prefix_owner = State.WAITING, None
        self._release(sequence)
        self._waiting.appendleft(sequence)

    @torch.inference_mode()
    def pause(self, sample_ids: Container[str]) -> Iterable[Sequence]:
        """Pause the named sequences in flight, and return them."""
        stopped = {self.in_flight.pop(id): None for id in list(self.in_flight) if id in sample_ids}
        for bucket in self.cache.buckets:
            bucket.stop_decoding(stopped)
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in stopped)
        self._running = {sequence: None for sequence in self._running if sequence not in stopped}
        for sequence in stopped:
            sequence.state, sequence.prefix_owner = State.PAUSED, None
        self._replace_prefix_owners()
        for sequence in stopped:
            if sequence.kv_length > 0:
                self.paused[sequence.id] = sequence
            elif sequence.bucket is not None:
                self._release(sequence)
        return stopped

    def finish(self, sequence: Sequence) -> None:
        del self.in_flight[sequence.id], self._running[sequence]
        if sequence.sampling.max_turns and sequence.finish is FinishReason.STOP:
            _bucket(sequence).stop_decoding((sequence,))
            sequence.state = State.PAUSED
            self.paused[sequence.id] = sequence
        else:
            self._release(sequence)
            sequence.state = State.FINISHED

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Release the rows of paused sequences."""
        for sample_id in sample_ids:
            sequence = self.paused.pop(sample_id, None)
            if sequence is not None:
                self._release(sequence)

    def move_to(self, cache: KVCache[Sequence]) -> None:
        """Give up all rows, and queue all running sequences again, for rows of another cache; no token is lost."""
        for sequence in (*self.paused.values(), *self.in_flight.values()):
            sequence.lose_cache()
        for sequence in self._running:
            sequence.state = State.WAITING
        # extendleft reverses its argument, so the order of admission is kept.
        self._waiting.extendleft(reversed(self._running))
        for index in (self.paused, self._running, self._prefix_index):
            index.clear()
        self.cache = cache

    # Forward passes.

    def schedule(self, max_prefill_tokens: int) -> list[tuple[Sequence, int]]:
        """Prepare a forward pass: admit sequences, start decoding, and set drafts.

        Returns:
            sequences that prefill in the pass, and the number of tokens of each. Together with the drafted tokens of
            all sequences these are at most `max_prefill_tokens`.
        """
        self._start_decoding()
        # Before admission: a running sequence that lacks memory for its next token has priority over new ones.
        for sequence in [each for each in self.decoding if each.room < 0]:
            self._grow_row(sequence)
        self._admit()
        # Admitted sequences that copied their prompt lack one token only, and decode in this pass.
        self._start_decoding()
        chunks = []
        for sequence in self._prefilling():
            if max_prefill_tokens == 0:
                break
            size = min(sequence.missing, max_prefill_tokens)
            chunks.append((sequence, size))
            max_prefill_tokens -= size
        # Prefill comes first: a draft only saves passes, whereas a sequence without its prompt produces nothing.
        for sequence in self.decoding:
            if sequence.old_tokens:
                max_prefill_tokens -= sequence.propose_draft(max_prefill_tokens)
        return chunks

    def next_image_runs(self, max_prefill_tokens: int) -> list[Run]:
        """Return the tokens of prompts with images that may prefill in the next pass; each prompt once."""
        found: dict[tuple[Feature, ...], Run] = {}
        # The order of submission is the order of admission.
        for sequence in self.in_flight.values():
            if max_prefill_tokens <= 0:
                break
            features, start = sequence.features, sequence.kv_length
            if features and start < features[-1].end and features not in found:
                found[features] = Run(0, 0, start, max_prefill_tokens, features)
                max_prefill_tokens -= sequence.missing
        return list(found.values())

    def record_prefill(self, chunks: Iterable[tuple[Sequence, int]]) -> None:
        """Record the tokens that a pass has prefilled, and copy complete prompts to the sequences that wait for them.

        This comes before the pass finishes any sequence: a finished prefix owner has no row to copy from.
        """
        for sequence, size in chunks:
            sequence.kv_length += size
        for sequence in self._running if chunks else ():
            owner = sequence.prefix_owner
            if owner is not None and owner.kv_length >= len(sequence.prompt) - 1:
                self._copy_prompt(owner, sequence)

    def _prefilling(self) -> list[Sequence]:
        """Running sequences that do not decode and wait for no prompt, in the order of admission."""
        if self.cache.num_decoding == len(self._running):
            return []
        return [each for each in self._running if each.prefix_owner is None and not each.decoding]

    def _start_decoding(self) -> None:
        for sequence in self._prefilling():
            if sequence.missing == 1:
                _bucket(sequence).start_decoding(sequence)

    # Rows.

    def _provide_row(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a row that holds its tokens; return False if it must wait for memory."""
        needed = self.cache.bucket_for(sequence.row_length)
        if sequence.bucket is not None and sequence.bucket.length >= needed.length:
            return True
        # Without this reserve a sequence would be admitted into the room that another one needs in the next pass.
        reserve = self.cache.largest_growth()
        while not self.cache.fits(needed, reserve):
            if not self._evict(sequence):
                return False
        # A resumed sequence has a row that is too short. Old and new row both exist during the copy, as `fits` assumes.
        if sequence.bucket is not None:
            self.cache.move_to_bucket(sequence, needed)
        else:
            self.cache.place(sequence, needed)
            sequence.kv_epoch = self.epoch
            self._share_prompt(sequence)
            self._register(sequence)
        return True

    def _grow_row(self, sequence: Sequence) -> None:
        """Move a decoding sequence whose row is full to a longer row, if need be at the cost of younger sequences."""
        if sequence.state is not State.RUNNING:
            return  # it was preempted for an older one
        longer = self.cache.bucket_for(sequence.row_length)
        while not self.cache.fits(longer):
            if self._evict(sequence):
                continue
            # The oldest running sequence is never preempted for another one, so some sequence always finishes.
            youngest = next(reversed(self._running))
            self._preempt(youngest)
            if youngest is sequence:
                return
        self.cache.move_to_bucket(sequence, longer)

    def _evict(self, requester: Sequence) -> bool:
        """Release a row of a sequence that is not running: the first paused one, else the last one in the queue.

        Returns:
            whether there was one. `requester` loses its own row only if nothing is running.
        """
        for sequence in chain(self.paused.values(), reversed(self._waiting)):
            if sequence.bucket is None or sequence is requester:
                continue
            self._release(sequence)
            self.paused.pop(sequence.id, None)
            return True
        # While others run, their memory returns when they finish. Otherwise only the requester's own row is left.
        if not self._running and requester.bucket is not None:
            self._release(requester)
            return True
        return False

    @torch.inference_mode()
    def _release(self, sequence: Sequence) -> None:
        _bucket(sequence).remove(sequence)
        sequence.kv_length = 0
        self._unregister(sequence)

    # Shared prompts.

    def _share_prompt(self, sequence: Sequence) -> None:
        """Copy the prompt from a sequence that has computed it, or else wait for one that is going to compute it."""
        # Each sequence computes the last prompt token itself: its first response token is sampled from those logits.
        shared = len(sequence.prompt) - 1
        for other in self._prefix_index.get(sequence.prefix, ()) if shared else ():
            if other.kv_epoch != self.epoch:
                continue
            if other.kv_length >= shared:
                self._copy_prompt(other, sequence)
                break
            # The search continues: a later row may already contain the prompt.
            if other.state is State.RUNNING and other.prefix_owner is None:
                sequence.prefix_owner = other

    def _copy_prompt(self, source: Sequence, sequence: Sequence) -> None:
        sequence.prefix_owner = None
        sequence.kv_length = len(sequence.prompt) - 1
        _bucket(sequence).copy(source, sequence.row, sequence.kv_length)
        if sequence.routes is not None and source.routes is not None:
            sequence.routes.copy_prompt(source.routes)

    def _replace_prefix_owners(self) -> None:
        """Where a prefix owner was paused, have the first sequence that waits for it prefill the prompt."""
        successors: dict[Sequence, Sequence] = {}
        for sequence in self._running:
            owner = sequence.prefix_owner
            if owner is not None and owner.state is not State.RUNNING:
                successor = successors.setdefault(owner, sequence)
                sequence.prefix_owner = None if successor is sequence else successor

    def _register(self, sequence: Sequence) -> None:
        self._prefix_index.setdefault(sequence.prefix, {})[sequence] = None

    def _unregister(self, sequence: Sequence) -> None:
        owners = self._prefix_index[sequence.prefix]
        del owners[sequence]
        if not owners:
            del self._prefix_index[sequence.prefix]


def _bucket(sequence: Sequence) -> LengthBucket[Sequence]:
    assert sequence.bucket is not None
    return sequence.bucket
