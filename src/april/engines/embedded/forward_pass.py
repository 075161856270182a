"""One forward pass: rows of many sequences at once, each attending to its own keys and values.

Invariants:
- the tokens of a pass are packed into one row [1, tokens]: first one per decoding sequence, bucket by bucket, in the
  order of the bucket's rows, then the runs: prefilled tokens, and drafts, which stand behind their sequence's last
  token;
- keys and values of every token of the pass are in the cache before any query of the same layer reads them;
- the keys that a query sees depend on its sequence alone: those at its own position and earlier ones, within the
  layer's window.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch

from april.engines.embedded.attention import LayerCall
from april.engines.embedded.bucket_attention import DecodeAttention, PrefillAttention
from april.engines.embedded.kv_cache import KVCache
from april.engines.embedded.sequence import Sequence
from april.engines.embedded.token_runs import TokenRun, attention_batches, draft_runs, prefill_runs
from april.engines.embedded.upload import upload
from april.engines.kernels import Bounds, KernelCase, VarlenKernel, varlen_kernel
from april.images.model_inputs import Run

_KEYS_MULTIPLE = 128
"""The largest number of keys of a sequence is rounded up to a multiple of this for a kernel."""


class ForwardPass:
    """One forward pass: every decoding sequence's last token and draft, and `chunks` of sequences that prefill.

    Attributes:
        sequences: sequences whose next token is sampled in this pass, and one token behind each token of their drafts.
        tokens, positions: [1, tokens], the input of the model.
        runs: all tokens in order, as runs of one sequence each.
        sampled: places of the tokens whose logits are needed, in the order of `sequences`; None for all tokens.
    """

    def __init__(self, cache: KVCache[Sequence], chunks: Iterable[tuple[Sequence, int]], device: torch.device) -> None:
        self._cache = cache
        self._decoding = [bucket for bucket in cache.buckets if bucket.num_decoding]
        self.sequences = [sequence for bucket in self._decoding for sequence in bucket.decoding]
        self._batches = attention_batches([*draft_runs(self.sequences), *prefill_runs(chunks)])
        # A decoding sequence's last token is a run of its own.
        self.runs = [TokenRun(each, each.kv_length, each.tokens[-1:]) for each in self.sequences]
        # Places of the tokens that are sampled from, by sequence.
        sampled_from = {sequence: [place] for place, sequence in enumerate(self.sequences)}
        count = len(self.runs)
        for run in (run for batch in self._batches for run in batch):
            sequence, size = run.sequence, len(run.tokens)
            # Every drafted token needs logits behind it; of a prefill, only the token that completes it does.
            if sequence in sampled_from:
                sampled_from[sequence] += range(count, count + size)
            elif run.start + size == len(sequence.tokens):
                self.sequences.append(sequence)
                sampled_from[sequence] = [count + size - 1]
            count += size
            self.runs.append(run)
        tokens = [token for run in self.runs for token in run.tokens]
        positions = [position for run in self.runs for position in range(run.start, run.start + len(run.tokens))]
        self._sizes = np.array([len(run.tokens) for run in self.runs])
        self._rows = np.array([(run.bucket.pool_index(run.sequence.row), run.bucket.length) for run in self.runs])
        begins, lengths = self._rows.repeat(self._sizes, axis=0).T
        # With neither prefill nor drafts, every token is sampled from, in the order of `sequences`.
        sampled = [place for each in self.sequences for place in sampled_from[each]] if self._batches else []
        # One copy to the device for all of them.
        sent = upload(np.concatenate((tokens, positions, begins, lengths, np.array(sampled, int))), device)
        self.tokens, self.positions, begins, lengths = sent[: 4 * count].view(4, 1, count).unbind(0)
        self.sampled = sent[4 * count :] if self._batches else None
        heads = torch.arange(cache.shape.heads, device=device)
        # Flat indices of each token in each KV head: one index_copy_ per pool then writes all buckets.
        self._places = (begins.T + heads * lengths.T + self.positions.T).flatten()
        self._kernels: dict[bool, VarlenKernel | None] = {}

    @property
    def image_runs(self) -> list[Run]:
        """All tokens as runs of the model's input, if any sequence has images."""
        if not any(run.sequence.features for run in self.runs):
            return []
        columns = (self._sizes.cumsum() - self._sizes).tolist()
        placed = zip(self.runs, columns, strict=True)
        return [Run(0, column, run.start, len(run.tokens), run.sequence.features) for run, column in placed]

    def attend(self, call: LayerCall) -> torch.Tensor:
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        key, value = (tensor[0].transpose(0, 1) for tensor in (call.key, call.value))
        keys.index_copy_(0, self._places, key.flatten(0, 1))
        values.index_copy_(0, self._places, value.flatten(0, 1))
        kernel = self._kernel(call)
        if kernel is not None:
            return self._attend_in_one_call(call, kernel)
        query = call.query[0].transpose(0, 1)
        decodes, prefills = self._by_bucket
        parts = [decode.attend(call, query) for decode in decodes]
        parts += [prefill.attend(call, query, key, value) for prefill in prefills]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def _kernel(self, call: LayerCall) -> VarlenKernel | None:
        softcap = call.softcap is not None
        if softcap not in self._kernels:
            keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
            # `_attend_in_one_call` passes each KV head as a sequence with one KV head and `group` query heads.
            group = call.query.shape[1] // self._cache.shape.heads
            case = KernelCase(keys.device, keys.dtype, group, 1, keys.shape[1], values.shape[1], softcap, cached=True)
            self._kernels[softcap] = varlen_kernel(case)
        return self._kernels[softcap]

    def _attend_in_one_call(self, call: LayerCall, kernel: VarlenKernel) -> torch.Tensor:
        """Compute all runs in one call, in which each KV head of a sequence is a sequence of its own.

        The query heads that share a KV head are its queries. The queries of a sequence must be adjacent: if any
        sequence has several tokens, queries are copied into the order of KV heads, and outputs back.
        """
        heads, tokens = self._cache.shape.heads, call.query.shape[2]
        group = call.query.shape[1] // heads
        pools = (self._cache.keys[call.layer].unsqueeze(1), self._cache.values[call.layer].unsqueeze(1))
        query = call.query[0].unflatten(0, (heads, group)).movedim(2, 1 if self._batches else 0)
        out = kernel(query.flatten(0, 1), *pools, self._bounds, call.scaling, call.window, call.softcap)
        if self._batches:
            out = out.view(heads, tokens, group, -1).transpose(0, 1)
        return out.reshape(1, tokens, heads * group, -1)

    @cached_property
    def _bounds(self) -> Bounds:
        """Bounds of every run in every KV head, for a kernel that computes all of them in one call."""
        heads = np.arange(self._cache.shape.heads)[:, None]
        used = np.array([run.start for run in self.runs]) + self._sizes
        firsts = heads * self._sizes.sum() + self._sizes.cumsum() - self._sizes
        begins = self._rows[:, 0] + heads * self._rows[:, 1]
        seen = np.broadcast_to(used, begins.shape)
        # Each token and KV head is a sequence of one query here, so token order needs no copy.
        if not self._batches:
            firsts, begins, seen = np.arange(begins.size), begins.T, seen.T
        ends = self._sizes.sum() * len(heads), self._cache.keys[0].shape[0]
        parts = (firsts.flatten(), ends[:1], begins.flatten(), ends[1:], seen.flatten())
        table = upload(np.concatenate(parts).astype(np.int32), self.tokens.device)
        bounds = table.split([begins.size + 1, begins.size + 1, begins.size])
        return Bounds(
            bounds[0],
            bounds[1],
            int(self._sizes.max()),
            -(-int(used.max()) // _KEYS_MULTIPLE) * _KEYS_MULTIPLE,
            bounds[2],
        )

    @cached_property
    def _by_bucket(self) -> tuple[list[DecodeAttention], list[PrefillAttention]]:
        """Calls of attention if no kernel computes all runs in one."""
        decodes, prefills, start, device = [], [], 0, self.tokens.device
        for bucket in self._decoding:
            stop = start + bucket.num_decoding
            longest = max(run.start for run in self.runs[start:stop]) + 1
            decodes.append(DecodeAttention(bucket, start, stop, longest, self.positions[0, start:stop]))
            start = stop
        for batch in self._batches:
            stop = start + sum(len(run.tokens) for run in batch)
            prefills.append(PrefillAttention.of(batch, start, stop, device))
            start = stop
        return decodes, prefills
