"""The embedded engine: what runs in a step.

Invariants:
- every sample in flight is either waiting or admitted, and at most `max_running` are admitted; samples are admitted in
  the order of submission, and who is preempted goes back to the front;
- a forward pass carries the last token and the draft of every decoding sequence and at most `prefill_chunk` tokens that
  prefill, so a long prompt never makes the others wait longer than that;
- the sequences that need the KV cache most give it up last: parked ones go first, then waiting ones, then the youngest
  admitted; nothing that was sampled is ever lost or drawn again;
- an admitted sequence waits for a `leader` only if that one was admitted before it.

Above 450 lines: who is in flight, waiting, admitted and parked is one state, and all methods here move sequences in it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import islice

import torch

from april.engines.device_memory import free_bytes, is_out_of_memory, release_cached
from april.engines.embedded.attention import ForwardPass
from april.engines.embedded.drafts import Drafter
from april.engines.embedded.kv_cache import KVCache, Tier, tier_lengths
from april.engines.embedded.model import NamedTensors, ServedModel
from april.engines.embedded.sampling import sample as draw_tokens
from april.engines.embedded.sequence import Sequence
from april.engines.pretrained import end_tokens
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory import Sample

log = logging.getLogger(__name__)

Drawn = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""
LOWER = "lower engine.kv_cache_gb, engine.max_running or rollout.max_response_length"
"""What to do where memory runs out again and again."""
_SHARE_OF_FREE_MEMORY = 0.4


class EmbeddedEngine:
    """Continuous batching in this process over a Hugging Face causal language model, as a rule the one in training.

    The model's parameters are shared, not copied, so an optimiser step is visible at once; call `update_weights` after
    it. Everything runs inline in `poll`, on the caller's thread.

    Args:
        model: any causal language model whose layers are attention through transformers' AttentionInterface. It is
            left as it is.
        max_running: decode slots, samples that decode together.
        context_length: prompt and response tokens of a sample; by default what the model's configuration allows and
            the KV cache can hold.
        kv_cache_bytes: most memory for keys and values, which is allocated as samples need it; by default 40 % of the
            memory that is free now. When it is used up, samples wait. `forget` frees it while no sample is in flight.
        on_update: what happens to the KV cache of interrupted samples when the weights change.
        prefill_chunk: tokens of prompts (and of resumed samples) per forward pass.
        dtype: compute in another type than the model's, on a copy of its parameters that `update_weights` refreshes.
        draft_tokens: tokens that a pass may verify for a sample besides drawing its next one, from what the other
            samples of its prompt said at such a place. No token changes; which passes a token shares with others does,
            and with it the rounding of its log-probability. Fewer, or none, are tried where they do not pay; 0: none.
        stop_token_ids: tokens that end samples whose sampling parameters name none; by default the end-of-sequence
            tokens of the model's generation configuration.
        stream_interval: decode steps per `poll`. More than one makes fewer, longer chunks; a finished sample is handed
            out at once all the same.

    Raises:
        TypeError, ValueError: the model or a setting is not supported; the message says why.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_running: int = 64,
        context_length: int | None = None,
        kv_cache_bytes: int | None = None,
        on_update: KVPolicy = "recompute",
        prefill_chunk: int = 1024,
        dtype: torch.dtype | None = None,
        draft_tokens: int = 0,
        stop_token_ids: Iterable[int] | None = None,
        stream_interval: int = 1,
    ) -> None:
        for name, value in (
            ("max_running", max_running),
            ("prefill_chunk", prefill_chunk),
            ("stream_interval", stream_interval),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if draft_tokens < 0:
            raise ValueError(f"draft_tokens = {draft_tokens}: must be 0, for no drafts, or positive")
        if on_update not in ("recompute", "keep"):
            raise ValueError(f"on_update = {on_update!r}: must be 'recompute' or 'keep'")
        self._model = ServedModel(model, dtype)
        self._stops = frozenset(end_tokens(model) if stop_token_ids is None else stop_token_ids)
        self.on_update = on_update
        self._prefill_chunk = prefill_chunk
        self._interval = stream_interval
        self._unseen = 0
        self._drafter = Drafter(draft_tokens)
        # What a pass takes is compared with what others took, so on a processor what other programs do must not count.
        self._clock = time.thread_time if self._model.device.type == "cpu" else time.perf_counter
        token_bytes = self._model.shape.bytes(self._model.dtype)
        budget = kv_cache_bytes
        if budget is None:
            budget = int(free_bytes(self._model.device) * _SHARE_OF_FREE_MEMORY)
        context = self._context_length(context_length, budget, token_bytes)
        self.capacity = Capacity(max_running, context, budget // token_bytes)
        self.version = 0
        self._epoch = 0
        self._cache: KVCache[Sequence] = KVCache(
            self._model.shape, context, budget, self._model.dtype, self._model.device
        )
        self._in_flight: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._admitted: dict[Sequence, None] = {}
        self._prefilling: list[Sequence] = []
        self._following: list[Sequence] = []
        self._parked: dict[str, Sequence] = {}
        self._residents: dict[tuple[int, ...], dict[Sequence, None]] = {}
        self._finished: list[Sequence] = []
        self._settings: dict[SamplingParams, SamplingParams] = {}

    def _context_length(self, asked: int | None, budget: int, token_bytes: int) -> int:
        longest = self._model.longest_context() if asked is None else asked
        known = getattr(self._model.config, "max_position_embeddings", longest)
        if not 2 <= longest <= known:
            raise ValueError(f"context_length = {asked}: must be 2 to {known}, what the model was configured for")
        held = [length for length in tier_lengths(longest) if length * token_bytes <= budget]
        if not held:
            least = tier_lengths(longest)[0] * token_bytes
            raise ValueError(f"kv_cache_bytes = {budget}: one short sample takes {least} bytes; raise it")
        context = longest if asked is not None else min(longest, held[-1])
        self._model.check_context(context)
        return context

    @property
    def running(self) -> int:
        return len(self._admitted)

    @property
    def kv_cache_bytes(self) -> int:
        """The most that rows of keys and values took so far, of the memory that is allocated for them."""
        return self._cache.peak_bytes

    @property
    def parked(self) -> list[str]:
        """The interrupted samples whose keys and values are kept, those that give them up first in front."""
        return list(self._parked)

    def submit(self, sample: Sample) -> None:
        tokens = [*sample.prompt_ids, *sample.response_ids]
        limit = min(len(tokens) + sample.budget_left, self.capacity.context_length)
        self._validate(sample, tokens, limit)
        stops = frozenset(sample.sampling.stop_token_ids) or self._stops
        sequence = Sequence.of(sample, tokens, limit, stops)
        parked = self._parked.pop(sample.id, None)
        if parked is not None:
            self._unregister(parked)
            parked.resume(sequence)
            self._register(parked)
            sequence = parked
        # Budgets and stop tokens are the sequence's; rows that share the rest are drawn together.
        shared = replace(sample.sampling, max_tokens=1, stop_token_ids=())
        sequence.sampling = self._settings.setdefault(shared, shared)
        self._drafter.follow(sequence)
        self._in_flight[sample.id] = sequence
        self._waiting.append(sequence)

    def _validate(self, sample: Sample, tokens: list[int], limit: int) -> None:
        context, vocabulary = self.capacity.context_length, self._model.vocabulary
        if sample.finish is not None:
            raise ValueError(f"sample {sample.id} has finished ({sample.finish}): there is nothing to continue")
        if sample.id in self._in_flight:
            raise ValueError(f"sample {sample.id} is in flight already")
        if not sample.prompt_ids:
            raise ValueError(f"sample {sample.id} has an empty prompt: the first token needs something to follow")
        if len(sample.prompt_ids) >= context:
            raise ValueError(
                f"sample {sample.id}: a prompt of {len(sample.prompt_ids)} tokens leaves no room for a response in a "
                f"context of {context} tokens; shorten it or raise context_length"
            )
        if len(tokens) >= limit:
            raise ValueError(
                f"sample {sample.id}: no budget left: {sample.length} response tokens of max_tokens = "
                f"{sample.sampling.max_tokens}, {len(tokens)} tokens of a context of {context}"
            )
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise ValueError(f"sample {sample.id}: token id {wrong} is outside the vocabulary of {vocabulary}")
        longest = self._cache.tier_for(limit - 1)
        if longest.row_bytes > self._cache.budget:
            raise ValueError(
                f"sample {sample.id}: up to {limit} tokens take {longest.row_bytes} bytes of KV cache, and "
                f"kv_cache_bytes = {self._cache.budget}; raise it or lower max_tokens"
            )

    async def poll(self) -> list[Chunk]:
        """Forward passes until there is something to hand out: a finished sample, or `stream_interval` decode steps."""
        # A cancelled poll is cancelled here, where nothing is half done.
        while self._in_flight:
            await asyncio.sleep(0)
            if not self._in_flight:
                break
            try:
                self._unseen += self._step()
            except (RuntimeError, MemoryError) as error:
                raise EngineError(f"a forward pass of the embedded engine failed: {error}") from error
            if self._finished or self._unseen >= self._interval:
                break
        return self._take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        names = {*self._in_flight, *(ended.id for ended in self._finished)} if sample_ids is None else set(sample_ids)
        stopped = {self._in_flight.pop(id): None for id in list(self._in_flight) if id in names}
        ended = [sequence for sequence in self._finished if sequence.id in names]
        self._finished = [sequence for sequence in self._finished if sequence.id not in names]
        chunks = [sequence.take(self.version) for sequence in (*ended, *stopped) if sequence.pending]
        with torch.inference_mode():
            for tier in self._cache.tiers:
                tier.hold_those(stopped)
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in stopped)
        self._admitted = {sequence: None for sequence in self._admitted if sequence not in stopped}
        self._prefilling = [sequence for sequence in self._prefilling if sequence not in stopped]
        self._following = [sequence for sequence in self._following if sequence not in stopped]
        self._find_leaders(stopped)
        for sequence in stopped:
            sequence.leader = None
            if sequence.kv_length > 0:
                self._parked[sequence.id] = sequence
            elif sequence.tier is not None:
                self._release(sequence)
        if not self._in_flight:
            self._unseen = 0
        return chunks

    def _find_leaders(self, stopped: Container[Sequence]) -> None:
        """Of those that wait for the prompt of a sequence that has stopped, the first computes it for the others."""
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

    async def update_weights(self, version: int, weights: NamedTensors | None = None) -> None:
        """Go over to policy `version`.

        `weights` is None if the parameters of the model given at the start were changed in place; else tensors by
        name, which are copied into them.
        """
        if self._in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        self._model.load(weights)
        self.version = version
        self._epoch += 1
        if self.on_update == "recompute":
            self._drop(list(self._parked))

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self._drop(list(self._parked) if sample_ids is None else sample_ids)
        if not self._parked and not self._in_flight:
            self._cache.release()

    async def close(self) -> None:
        await self.interrupt()
        self.forget()

    def _take(self) -> list[Chunk]:
        chunks = [sequence.take(self.version) for sequence in self._finished]
        self._finished = []
        if self._unseen >= self._interval:
            chunks += [sequence.take(self.version) for sequence in self._in_flight.values() if sequence.pending]
            self._unseen = 0
        return chunks

    @torch.inference_mode()
    def _step(self) -> bool:
        """One forward pass; true if it sampled anything. One that runs out of memory is tried once more."""
        for _ in range(2):
            try:
                computed = self._compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            else:
                return self._advance(*computed)
            # Not before here: the exception holds the tensors that filled the memory.
            self._make_room(reason)
        raise EngineError(f"a forward pass of the embedded engine failed: {reason}; {LOWER}")

    def _make_room(self, reason: str) -> None:
        """Give up all of the KV cache, and continue with half of its budget; no token is lost."""
        for sequence in (*self._parked.values(), *self._in_flight.values()):
            sequence.lose_cache()
        self._waiting.extendleft(reversed(self._admitted))
        for held in (self._parked, self._residents, self._admitted, self._prefilling, self._following):
            held.clear()
        needed = max(self._cache.tier_for(sequence.limit - 1).row_bytes for sequence in self._in_flight.values())
        budget = max(self._cache.budget // 2, needed)
        log.warning(
            "memory ran out in generation; the KV cache takes at most %.2f GB from now on: %s", budget / 1e9, reason
        )
        shape, peak = self._model.shape, self._cache.peak_bytes
        self._cache = KVCache(shape, self.capacity.context_length, budget, self._model.dtype, self._model.device)
        self._cache.peak_bytes = peak
        self.capacity = replace(self.capacity, kv_tokens=budget // shape.bytes(self._model.dtype))
        release_cached()

    def _compute(self) -> tuple[list[tuple[Sequence, int]], ForwardPass, Drawn, float]:
        """Run the model and draw tokens. Until the end of it no sequence has changed but for its place."""
        for sequence in [each for tier in self._cache.tiers for each in tier.decoding if each.room < 0]:
            self._grow(sequence)
        self._admit()
        chunks = self._chunks()
        began = self._clock()
        decoding = [sequence for tier in self._cache.tiers for sequence in tier.decoding]
        prefilling = sum(size for _, size in chunks)
        self._drafter.draft(decoding, prefilling, self._prefill_chunk)
        step = ForwardPass(self._cache, chunks, self._model.device)
        logits = self._model.logits(step.tokens, step.positions, step, step.sampled)
        tokens = self._draw(step.sequences, logits) if step.sequences else ([], [])
        return chunks, step, tokens, began

    def _advance(self, chunks: list[tuple[Sequence, int]], step: ForwardPass, tokens: Drawn, began: float) -> bool:
        """Give every sequence what was computed for it."""
        decoding = sum(len(tier.decoding) for tier in self._cache.tiers)
        for sequence, size in chunks:
            sequence.kv_length += size
        self._lead()
        drawn = self._append(step.sequences, tokens) if step.sequences else {}
        self._drafter.learn(drawn, decoding, sum(size for _, size in chunks), self._clock() - began)
        return bool(step.sequences)

    def _chunks(self) -> list[tuple[Sequence, int]]:
        chunks, left = [], self._prefill_chunk
        for sequence in self._prefilling:
            if left == 0:
                break
            size = min(sequence.missing, left)
            chunks.append((sequence, size))
            left -= size
        return chunks

    def _draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Drawn:
        """Draw the next token of each sequence, and one behind each token of its draft."""
        verifying = any(sequence.draft or sequence.replay for sequence in sequences)
        if verifying:
            settings = [sequence.sampling for sequence in sequences for _ in range(1 + len(sequence.draft))]
            numbers = [number for sequence in sequences for number in sequence.numbers()]
        else:
            settings = [sequence.sampling for sequence in sequences]
            numbers = [sequence.number() for sequence in sequences]
        try:
            tokens, logprobs = draw_tokens(logits, settings, numbers)
        except (RuntimeError, MemoryError):
            for sequence, number in zip(sequences, numbers, strict=False) if not verifying else ():
                sequence.ahead.insert(0, number)  # the pass may be tried again
            raise
        if math.isnan(sum(logprobs)):
            raise EngineError(f"policy version {self.version} computes logits that are not numbers")
        return tokens, logprobs

    def _append(self, sequences: list[Sequence], tokens: Drawn) -> dict[Sequence, int]:
        """Append what was drawn for each sequence, as far as its draft holds.

        Returns:
            tokens appended, of the sequences that had a draft.
        """
        verifying = any(sequence.draft or sequence.replay for sequence in sequences)
        ended, drawn, results = [], {}, zip(*tokens, strict=True)
        for sequence in sequences:
            if verifying:
                count = sequence.verify(list(islice(results, 1 + len(sequence.draft))))
                if sequence.draft:
                    drawn[sequence] = count
            else:
                sequence.append(*next(results))
            if sequence.finish is not None:
                ended.append(sequence)
        # Rows move from here on, and take with them what every sequence's length says it has.
        for sequence in ended:
            self._end(sequence)
        self._decode_prefilled()
        return drawn

    def _decode_prefilled(self) -> None:
        prefilling = []
        for sequence in self._prefilling:
            if sequence.finish is not None:
                continue
            if sequence.missing > 1:
                prefilling.append(sequence)
            else:
                _tier(sequence).decode(sequence)
        self._prefilling = prefilling

    def _end(self, sequence: Sequence) -> None:
        self._finished.append(sequence)
        del self._in_flight[sequence.id], self._admitted[sequence]
        if sequence.sampling.max_turns and sequence.finish is FinishReason.STOP:
            _tier(sequence).hold(sequence)  # its turn has ended; the next one goes on from here
            self._parked[sequence.id] = sequence
        else:
            self._release(sequence)

    def _admit(self) -> None:
        while self._waiting and len(self._admitted) < self.capacity.slots:
            sequence = self._waiting[0]
            if not self._seat(sequence):
                break
            self._waiting.popleft()
            self._admitted[sequence] = None
            if sequence.leader is not None:
                self._following.append(sequence)
            else:
                self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        if sequence.missing == 1:
            _tier(sequence).decode(sequence)
        else:
            self._prefilling.append(sequence)

    def _seat(self, sequence: Sequence) -> bool:
        """Give `sequence` a row that holds its tokens; false if it has to wait for one."""
        needed = self._cache.tier_for(sequence.longest)
        if sequence.tier is not None and sequence.tier.length >= needed.length:
            return True
        # Without this reserve a sample is admitted into the room that another asks for in the next step.
        reserve = self._cache.growth()
        while not self._cache.fits(needed, reserve):
            if not self._evict(sequence):
                return False
        if sequence.tier is not None:
            self._cache.outgrow(sequence, needed)
        else:
            self._place(sequence, needed)
        return True

    def _place(self, sequence: Sequence, tier: Tier[Sequence]) -> None:
        """A row of `tier` for a sequence that has none, with its prompt copied from one that has it, or soon will."""
        self._cache.place(sequence, tier)
        sequence.kv_epoch = self._epoch
        shared = len(sequence.prompt) - 1
        for other in self._residents.get(sequence.prompt, ()) if shared else ():
            if other.kv_epoch != self._epoch:
                continue
            if other.kv_length >= shared:
                self._copy_prompt(other, sequence)
                break
            if other in self._admitted and other.leader is None:
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
        """Give up the KV cache of one sequence that is not admitted: the one parked longest, else the last to run."""
        for sequence in [*self._parked.values(), *reversed(self._waiting)]:
            if sequence.tier is None or sequence is keep:
                continue
            self._release(sequence)
            self._parked.pop(sequence.id, None)
            return True
        if not self._admitted and keep.tier is not None:
            self._release(keep)
            return True
        return False

    def _grow(self, sequence: Sequence) -> None:
        """Move a decoding sequence whose row is full to a longer one, if need be at the cost of younger sequences."""
        if sequence not in self._admitted:
            return
        longer = self._cache.tier_for(sequence.longest)
        while not self._cache.fits(longer):
            if self._evict(sequence):
                continue
            youngest = next(reversed(self._admitted))
            self._preempt(youngest)
            if youngest is sequence:
                return
        self._cache.outgrow(sequence, longer)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue; its tokens stay, its KV cache goes."""
        del self._admitted[sequence]
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

    def _drop(self, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids:
            sequence = self._parked.pop(sample_id, None)
            if sequence is not None:
                self._release(sequence)

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
