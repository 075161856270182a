"""The embedded engine: what runs in a step.

Invariants:
- a forward pass carries the last token and the draft of every decoding sequence and at most `prefill_chunk` tokens that
  prefill, so that decoding sequences never wait longer for a long prompt;
- a pass changes no sequence before the model and the sampling are done, so that it can be tried again;
- no sampled token is lost or drawn again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import torch

from april.engines.device_memory import free_bytes, is_out_of_memory, release_cached
from april.engines.embedded.attention import ForwardPass
from april.engines.embedded.kv_cache import KVCache, tier_lengths
from april.engines.embedded.model import NamedTensors, ServedModel
from april.engines.embedded.sampling import sample as draw_tokens
from april.engines.embedded.sequence import Sequence
from april.engines.embedded.sequences import Sequences
from april.engines.pretrained import end_tokens
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory import Sample

log = logging.getLogger(__name__)

Drawn = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""
LOWER = "lower engine.kv_cache_gb, engine.max_num_seqs or rollout.max_response_length"
"""What to do where memory runs out again and again."""
_SHARE_OF_FREE_MEMORY = 0.4


class EmbeddedEngine:
    """Continuous batching in this process over a Hugging Face causal language model, as a rule the one in training.

    The model's parameters are shared, not copied, so an optimiser step is visible at once; call `update_weights` after
    it. Everything runs inline in `poll`, on the caller's thread.

    Args:
        model: any causal language model whose layers are attention through transformers' AttentionInterface. It is
            left as it is.
        max_num_seqs: decode slots, samples that decode together.
        context_length: prompt and response tokens of a sample; by default what the model's configuration allows and
            the KV cache can hold.
        kv_cache_bytes: most memory for keys and values, which is allocated as samples need it; by default 40 % of the
            memory that is free now. When it is used up, samples wait. `forget` frees it while no sample is in flight.
        on_update: what happens to the KV cache of interrupted samples when the weights change.
        prefill_chunk: tokens of prompts (and of resumed samples) per forward pass.
        dtype: compute in another type than the model's, on a copy of its parameters that `update_weights` refreshes.
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
        max_num_seqs: int = 64,
        context_length: int | None = None,
        kv_cache_bytes: int | None = None,
        on_update: KVPolicy = "recompute",
        prefill_chunk: int = 1024,
        dtype: torch.dtype | None = None,
        stop_token_ids: Iterable[int] | None = None,
        stream_interval: int = 1,
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("prefill_chunk", prefill_chunk),
            ("stream_interval", stream_interval),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if on_update not in ("recompute", "keep"):
            raise ValueError(f"on_update = {on_update!r}: must be 'recompute' or 'keep'")
        self._model = ServedModel(model, dtype)
        self._stops = frozenset(end_tokens(model) if stop_token_ids is None else stop_token_ids)
        self.on_update = on_update
        self._prefill_chunk = prefill_chunk
        self._interval = stream_interval
        self._unseen = 0
        token_bytes = self._model.shape.bytes(self._model.dtype)
        budget = kv_cache_bytes
        if budget is None:
            budget = int(free_bytes(self._model.device) * _SHARE_OF_FREE_MEMORY)
        context = self._context_length(context_length, budget, token_bytes)
        self.capacity = Capacity(max_num_seqs, context, budget // token_bytes)
        self.version = 0
        self._sequences = Sequences(self._kv_cache(context, budget), max_num_seqs)
        self._finished: list[Sequence] = []
        self._settings: dict[SamplingParams, SamplingParams] = {}

    def _kv_cache(self, context_length: int, budget: int) -> KVCache[Sequence]:
        return KVCache(self._model.shape, context_length, budget, self._model.dtype, self._model.device)

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
        return len(self._sequences.admitted)

    @property
    def kv_cache_bytes(self) -> int:
        """The most that rows of keys and values took so far, of the memory that is allocated for them."""
        return self._sequences.cache.peak_bytes

    @property
    def parked(self) -> list[str]:
        """Interrupted samples whose keys and values are kept. The first one gives them up first."""
        return list(self._sequences.parked)

    def submit(self, sample: Sample) -> None:
        tokens = [*sample.prompt_ids, *sample.response_ids]
        limit = min(len(tokens) + sample.budget_left, self.capacity.context_length)
        self._validate(sample, tokens, limit)
        stops = frozenset(sample.sampling.stop_token_ids) or self._stops
        sequence = self._sequences.add(Sequence.of(sample, tokens, limit, stops))
        # Budgets and stop tokens are the sequence's; rows that share the rest are drawn together.
        shared = replace(sample.sampling, max_tokens=1, stop_token_ids=())
        sequence.sampling = self._settings.setdefault(shared, shared)

    def _validate(self, sample: Sample, tokens: list[int], limit: int) -> None:
        context, vocabulary = self.capacity.context_length, self._model.vocabulary
        if sample.finish is not None:
            raise ValueError(f"sample {sample.id} has finished ({sample.finish}): there is nothing to continue")
        if sample.id in self._sequences.in_flight:
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
        longest = self._sequences.cache.tier_for(limit - 1)
        if longest.row_bytes > self._sequences.cache.budget:
            raise ValueError(
                f"sample {sample.id}: up to {limit} tokens take {longest.row_bytes} bytes of KV cache, and "
                f"kv_cache_bytes = {self._sequences.cache.budget}; raise it or lower max_tokens"
            )

    async def poll(self) -> list[Chunk]:
        """Forward passes until there is something to hand out: a finished sample, or `stream_interval` decode steps."""
        # A cancelled poll is cancelled here, where nothing is half done.
        while self._sequences.in_flight:
            await asyncio.sleep(0)
            if not self._sequences.in_flight:
                break
            try:
                self._unseen += self._step()
            except (RuntimeError, MemoryError) as error:
                raise EngineError(f"a forward pass of the embedded engine failed: {error}") from error
            if self._finished or self._unseen >= self._interval:
                break
        return self._take()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        every = (*self._sequences.in_flight, *(ended.id for ended in self._finished))
        names = set(every if sample_ids is None else sample_ids)
        stopped = self._sequences.stop(names)
        ended = [sequence for sequence in self._finished if sequence.id in names]
        self._finished = [sequence for sequence in self._finished if sequence.id not in names]
        chunks = [sequence.take(self.version) for sequence in (*ended, *stopped) if sequence.pending]
        if not self._sequences.in_flight:
            self._unseen = 0
        return chunks

    async def update_weights(self, version: int, weights: NamedTensors | None = None) -> None:
        """Go over to policy `version`.

        `weights` is None if the parameters of the model given at the start were changed in place; else tensors by
        name, which are copied into them.
        """
        if self._sequences.in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        self._model.load(weights)
        self.version = version
        self._sequences.epoch += 1
        if self.on_update == "recompute":
            self._sequences.drop(list(self._sequences.parked))

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self._sequences.drop(list(self._sequences.parked) if sample_ids is None else sample_ids)
        if not self._sequences.parked and not self._sequences.in_flight:
            self._sequences.cache.release()

    async def close(self) -> None:
        await self.interrupt()
        self.forget()

    def _take(self) -> list[Chunk]:
        chunks = [sequence.take(self.version) for sequence in self._finished]
        self._finished = []
        if self._unseen >= self._interval:
            chunks += [each.take(self.version) for each in self._sequences.in_flight.values() if each.pending]
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
        full, shape = self._sequences.cache, self._model.shape
        longest = max(sequence.limit - 1 for sequence in self._sequences.in_flight.values())
        budget = max(full.budget // 2, full.tier_for(longest).row_bytes)
        log.warning(
            "memory ran out in generation; the KV cache takes at most %.2f GB from now on: %s", budget / 1e9, reason
        )
        self._sequences.move_to(self._kv_cache(self.capacity.context_length, budget))
        self._sequences.cache.peak_bytes = full.peak_bytes
        del full  # or its memory is not released
        self.capacity = replace(self.capacity, kv_tokens=budget // shape.bytes(self._model.dtype))
        release_cached()

    def _compute(self) -> tuple[list[tuple[Sequence, int]], ForwardPass, Drawn]:
        """Run the model and draw tokens. Sequences change nothing but their rows."""
        self._sequences.admit()
        chunks = self._sequences.chunks(self._prefill_chunk)
        self._sequences.draft(self._prefill_chunk - sum(size for _, size in chunks))
        step = ForwardPass(self._sequences.cache, chunks, self._model.device)
        logits = self._model.logits(step.tokens, step.positions, step, step.sampled)
        tokens = self._draw(step.sequences, logits) if step.sequences else ([], [])
        return chunks, step, tokens

    def _advance(self, chunks: list[tuple[Sequence, int]], step: ForwardPass, tokens: Drawn) -> bool:
        """Give sequences the keys, values and tokens that were computed for them."""
        self._sequences.prefilled(chunks)
        if step.sequences:
            self._append(step.sequences, tokens)
        return bool(step.sequences)

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

    def _append(self, sequences: list[Sequence], tokens: Drawn) -> None:
        """Append to each sequence the tokens drawn for it, up to the first that differs from its draft."""
        verifying = any(sequence.draft or sequence.replay for sequence in sequences)
        ended, results = [], zip(*tokens, strict=True)
        for sequence in sequences:
            if verifying:
                sequence.verify(list(islice(results, 1 + len(sequence.draft))))
            else:
                sequence.append(*next(results))
            if sequence.finish is not None:
                ended.append(sequence)
        # Rows move from here on, and take with them what every sequence's length says it has.
        for sequence in ended:
            self._sequences.end(sequence)
        self._finished += ended
        self._sequences.decode_prefilled()
