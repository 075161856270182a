"""The embedded engine: what a forward pass computes, and how its results are handed out.

Invariants:
- a forward pass carries the last token and the draft of every decoding sequence and at most `prefill_chunk` tokens that
  prefill, so that decoding sequences never wait longer for a long prompt;
- a pass changes nothing but rows of sequences before the model and the sampling are done, so that it can be repeated;
- no sampled token is lost or drawn again;
- while the engine sleeps it holds no KV cache, and of weights only those that it shares (`device_turns.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import torch

from april.engines.device_memory import free_bytes, is_out_of_memory, release_cached
from april.engines.device_turns import DeviceTurns, TurnState
from april.engines.embedded.batch_scheduler import BatchScheduler
from april.engines.embedded.forward_pass import ForwardPass
from april.engines.embedded.kv_cache import KVCache, bucket_lengths
from april.engines.embedded.model import NamedTensors, ServedModel
from april.engines.embedded.route_log import SequenceRoutes
from april.engines.embedded.sampling import sample as draw_tokens
from april.engines.embedded.sequence import Sequence
from april.engines.embedded.token_routes import DraftRoutes, write_routes
from april.engines.fit import require_room
from april.engines.pretrained import end_tokens
from april.engines.routers import RouteCapture
from april.images.source import ImageError
from april.images.store import ImageStore
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.routes import RouterReplay
from april.rollout.trajectory.sample import Sample

log = logging.getLogger(__name__)

Drawn = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""
ADVICE_ON_MEMORY = "lower engine.kv_cache_gb, engine.max_num_seqs or rollout.max_response_length"
_SHARE_OF_FREE_MEMORY = 0.4


class EmbeddedEngine:
    """Continuous batching in this process over a Hugging Face causal language model, usually the one in training.

    The model's parameters are shared, not copied, so an optimiser step is visible at once; call `update_weights` after
    it. Everything runs inline in `poll`, on the caller's thread.

    Args:
        model: any causal language model whose layers are attention through transformers' AttentionInterface. It is not
            modified.
        max_num_seqs: decode slots, samples that decode together.
        context_length: prompt and response tokens of a sample; by default the length that the model's configuration
            allows and the KV cache can hold.
        kv_cache_bytes: maximum memory for keys and values, which is allocated as samples need it; by default 40 % of
            the memory that is free now. When it is used up, samples wait. `forget` frees it while no sample is in
            flight.
        on_update: treatment of the KV cache of interrupted samples at a weight update.
        prefill_chunk: tokens of prompts (and of resumed samples) per forward pass.
        dtype: compute in another type than the model's, on a copy of its parameters that `update_weights` refreshes.
        stop_token_ids: tokens that end samples whose sampling parameters name none; by default the end-of-sequence
            tokens of the model's generation configuration.
        stream_interval: decode steps per `poll`. More than one makes fewer, longer chunks; a finished sample is always
            handed out at once.
        router_replay: hand out the routes of consumed tokens: "recorded" once, "latest" again whenever a token is
            computed again.
        images: images of prompts; None for an engine that takes none.

    Raises:
        TypeError, ValueError: the model or a setting is not supported.
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
        router_replay: RouterReplay = "off",
        images: ImageStore | None = None,
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("prefill_chunk", prefill_chunk),
            ("stream_interval", stream_interval),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if on_update not in get_args(KVPolicy):
            raise ValueError(f"on_update = {on_update!r}: must be one of {', '.join(get_args(KVPolicy))}")
        self._model = ServedModel(model, dtype, images)
        self._undrawn = () if images is None else images.undrawn
        self._capture = None if router_replay == "off" else RouteCapture(self._model.module)
        self._latest_routes = router_replay == "latest"
        self._stop_token_ids = frozenset(end_tokens(model) if stop_token_ids is None else stop_token_ids)
        self.on_update = on_update
        self._prefill_chunk = prefill_chunk
        self._stream_interval = stream_interval
        self._steps_since_handout = 0
        token_bytes = self._model.shape.bytes(self._model.dtype)
        budget = kv_cache_bytes
        if budget is None:
            budget = int(free_bytes(self._model.device) * _SHARE_OF_FREE_MEMORY)
        context = self._context_length(context_length, budget, token_bytes)
        self.capacity = Capacity(max_num_seqs, context, budget // token_bytes)
        self.version = 0
        self.turns = DeviceTurns()
        self._scheduler = BatchScheduler(self._kv_cache(context, budget), max_num_seqs)
        self._finished: list[Sequence] = []
        """Sequences whose last tokens were not handed out yet."""
        self._shared_sampling: dict[SamplingParams, SamplingParams] = {}

    def _kv_cache(self, context_length: int, budget: int) -> KVCache[Sequence]:
        return KVCache(self._model.shape, context_length, budget, self._model.dtype, self._model.device)

    def _context_length(self, requested: int | None, budget: int, token_bytes: int) -> int:
        longest = self._model.longest_context() if requested is None else requested
        configured = getattr(self._model.config, "max_position_embeddings", longest)
        if not 2 <= longest <= configured:
            raise ValueError(
                f"context_length = {requested}: must be 2 to {configured}, the length the model was configured for"
            )
        lengths = bucket_lengths(longest)
        fitting = [length for length in lengths if length * token_bytes <= budget]
        if not fitting:
            raise ValueError(
                f"kv_cache_bytes = {budget}: one short sample takes {lengths[0] * token_bytes} bytes; raise it"
            )
        context = longest if requested is not None else min(longest, fitting[-1])
        self._model.check_context(context)
        return context

    @property
    def running(self) -> int:
        return self._scheduler.num_running

    @property
    def kv_cache_bytes(self) -> int:
        """Largest size of all rows of keys and values so far."""
        return self._scheduler.cache.peak_bytes

    @property
    def paused(self) -> list[str]:
        """Ids of interrupted samples whose keys and values are kept, those first that give them up first."""
        return list(self._scheduler.paused)

    def submit(self, sample: Sample) -> None:
        assert self.turns.serving, f"the embedded engine is {self.turns.state.value}: it takes no samples"
        tokens = [*sample.prompt_ids, *sample.response_ids]
        limit = min(len(tokens) + sample.budget_left, self.capacity.context_length)
        self._validate(sample, tokens, limit)
        stop_token_ids = frozenset(sample.sampling.stop_token_ids) or self._stop_token_ids
        sequence = Sequence.of(sample, tokens, limit, stop_token_ids)
        # The sequence has budget and stop tokens of its own; rows that share all other settings are drawn together.
        shared = replace(sample.turn_sampling, max_tokens=1, stop_token_ids=(), stop=())
        sequence.sampling = self._shared_sampling.setdefault(shared, shared)
        if self._capture is not None:
            known = 0 if sample.routes is None else sample.routes.length
            sequence.routes = SequenceRoutes(len(sample.prompt_ids), known, self._latest_routes)
        self._scheduler.submit(sequence)

    def _validate(self, sample: Sample, tokens: list[int], limit: int) -> None:
        context, vocabulary = self.capacity.context_length, self._model.vocabulary
        if sample.finish is not None:
            raise ValueError(f"sample {sample.id} has finished ({sample.finish}): there is nothing to continue")
        if sample.id in self._scheduler.in_flight:
            raise ValueError(f"sample {sample.id} is already in flight")
        if sample.features and self._model.images is None:
            raise ValueError(f"sample {sample.id}: its prompt has images, but this engine was made without `images`")
        require_room(sample, context, "the engine")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise ValueError(f"sample {sample.id}: token id {wrong} is outside the vocabulary of {vocabulary}")
        cache = self._scheduler.cache
        # Keys and values of the last token are never computed, because no token follows it.
        row_bytes = cache.bucket_for(limit - 1).row_bytes
        if row_bytes > cache.budget:
            raise ValueError(
                f"sample {sample.id}: up to {limit} tokens take {row_bytes} bytes of KV cache, and "
                f"kv_cache_bytes = {cache.budget}; raise it or lower max_tokens"
            )

    async def poll(self) -> list[Chunk]:
        """Run forward passes until a sample has finished, or for `stream_interval` decode steps."""
        # A cancelled poll is cancelled here, between two passes.
        while self._scheduler.in_flight:
            await asyncio.sleep(0)
            try:
                if self._model.images is not None:
                    await self._model.images.prepare(self._scheduler.next_image_runs(self._prefill_chunk))
                # While this task waited, another one may have interrupted the last samples.
                if not self._scheduler.in_flight:
                    break
                self._steps_since_handout += self._step()
            except (RuntimeError, MemoryError, ImageError) as error:
                raise EngineError(f"a forward pass of the embedded engine failed: {error}") from error
            if self._finished or self._steps_since_handout >= self._stream_interval:
                break
        return self._take_chunks()

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        every = (*self._scheduler.in_flight, *(sequence.id for sequence in self._finished))
        ids = set(every if sample_ids is None else sample_ids)
        paused = self._scheduler.pause(ids)
        finished = [sequence for sequence in self._finished if sequence.id in ids]
        self._finished = [sequence for sequence in self._finished if sequence.id not in ids]
        if not self._scheduler.in_flight:
            self._steps_since_handout = 0
        return [each.take_chunk(self.version) for each in (*finished, *paused) if each.pending_logprobs]

    async def update_weights(self, version: int, weights: NamedTensors | None = None) -> None:
        """Update to policy `version`.

        Args:
            weights: None if the parameters of the model given at the start were changed in place; otherwise tensors by
                name, which are copied into them.
        """
        if self._scheduler.in_flight:
            raise EngineError("weights change only while nothing is in flight: interrupt first")
        with self.turns.updating():
            self._model.load(weights)
        self.version = version
        self._scheduler.epoch += 1
        if self.on_update != "keep":
            self._scheduler.forget(self.paused)

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        self._scheduler.forget(self.paused if sample_ids is None else sample_ids)
        if not self._scheduler.paused and not self._scheduler.in_flight:
            self._scheduler.cache.release()

    async def sleep(self) -> None:
        """Release the KV cache, and weights that the engine does not share (see `SleepingEngine`)."""
        with self.turns.to(TurnState.INTERRUPTED):
            assert not self._scheduler.in_flight, "samples are in flight"
        with self.turns.to(TurnState.ASLEEP):
            self.forget()
            self._model.release()
        release_cached(garbage=False)

    async def wake_weights(self) -> None:
        with self.turns.to(TurnState.WEIGHTS_AWAKE):
            self._model.allocate()

    async def wake_kv_cache(self) -> None:
        """Serve again. The KV cache is allocated as samples need it, at once in its size before the sleep."""
        with self.turns.to(TurnState.SERVING):
            pass

    async def close(self) -> None:
        await self.interrupt()
        self.forget()

    def _take_chunks(self) -> list[Chunk]:
        chunks = [sequence.take_chunk(self.version) for sequence in self._finished]
        self._finished = []
        if self._steps_since_handout >= self._stream_interval:
            in_flight = self._scheduler.in_flight.values()
            chunks += [each.take_chunk(self.version) for each in in_flight if each.pending_logprobs]
            self._steps_since_handout = 0
        return chunks

    @torch.inference_mode()
    def _step(self) -> bool:
        """Run one forward pass and return whether it sampled a token. If memory runs out, the pass is repeated once."""
        for _ in range(2):
            try:
                chunks, step, drawn = self._compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            else:
                drafts = [] if self._capture is None else write_routes(step.runs, self._capture.take())
                self._scheduler.record_prefill(chunks)
                self._append(step.sequences, drawn, drafts)
                return bool(step.sequences)
            # Not inside the except clause: the exception holds the tensors that filled the memory.
            self._make_room(reason)
        raise EngineError(f"a forward pass of the embedded engine failed: {reason}; {ADVICE_ON_MEMORY}")

    def _make_room(self, reason: str) -> None:
        """Give up all of the KV cache, and continue with half of its budget; no token is lost."""
        full, shape = self._scheduler.cache, self._model.shape
        longest = max(sequence.limit - 1 for sequence in self._scheduler.in_flight.values())
        # The longest sample in flight must still fit, or it could never be admitted again.
        budget = max(full.budget // 2, full.bucket_for(longest).row_bytes)
        log.warning(
            "memory ran out in generation; the KV cache takes at most %.2f GB from now on: %s", budget / 1e9, reason
        )
        self._scheduler.move_to(self._kv_cache(self.capacity.context_length, budget))
        self._scheduler.cache.peak_bytes = full.peak_bytes
        del full  # or its memory is not released
        self.capacity = replace(self.capacity, kv_tokens=budget // shape.bytes(self._model.dtype))
        release_cached()

    def _compute(self) -> tuple[list[tuple[Sequence, int]], ForwardPass, Drawn]:
        """Run the model and draw tokens, without changing anything of a sequence but its row and its draft."""
        if self._capture is not None:
            self._capture.start()
        chunks = self._scheduler.schedule(self._prefill_chunk)
        step = ForwardPass(self._scheduler.cache, chunks, self._model.device)
        logits = self._model.logits(step.tokens, step.positions, step, step.sampled, step.image_runs)
        drawn = self._draw(step.sequences, logits) if step.sequences else ([], [])
        return chunks, step, drawn

    def _draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Drawn:
        """Draw the next token of each sequence, and one behind each token of its draft."""
        sampling, numbers = [], []
        for sequence in sequences:
            count = 1 + len(sequence.draft)
            sampling += [sequence.sampling] * count
            numbers += sequence.uniforms.peek(count)
        for token in self._undrawn:
            logits[:, token] = -math.inf
        tokens, logprobs = draw_tokens(logits, sampling, numbers)
        # A single NaN makes the sum NaN. Raised here, before any sequence has changed.
        if math.isnan(sum(logprobs)):
            raise EngineError(f"policy version {self.version} computes logits that are not numbers")
        return tokens, logprobs

    def _append(self, sequences: list[Sequence], drawn: Drawn, drafts: Iterable[DraftRoutes]) -> None:
        """Append to each sequence its tokens, up to the first that differs from its draft, and finish complete ones."""
        tokens, logprobs = drawn
        end = 0
        for sequence in sequences:
            begin, end = end, end + 1 + len(sequence.draft)
            if sequence.old_tokens:
                sequence.accept(tokens[begin:end], logprobs[begin:end])
            else:
                sequence.append(tokens[begin], logprobs[begin])
        for draft in drafts:
            draft.write()
        # Only now, because rows move, together with the keys and values that the lengths of all sequences account for.
        finished = [sequence for sequence in sequences if sequence.finish is not None]
        for sequence in finished:
            self._scheduler.finish(sequence)
        self._finished += finished
