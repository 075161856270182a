"""Runs of tokens that a forward pass computes, and which of them share an attention call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from april.engines.embedded.length_bucket import LengthBucket
from april.engines.embedded.sequence import Sequence

_PADDING_WORTH_A_CALL = 64
"""Padded tokens that cost the same as one more call of attention."""


class TokenRun(NamedTuple):
    """Consecutive tokens of one sequence in a forward pass, the first of them at position `start`."""

    sequence: Sequence
    start: int
    tokens: list[int]

    @property
    def bucket(self) -> LengthBucket[Sequence]:
        assert self.sequence.bucket is not None
        return self.sequence.bucket


def draft_runs(sequences: Iterable[Sequence]) -> Iterator[TokenRun]:
    return (TokenRun(each, each.kv_length + 1, each.draft) for each in sequences if each.draft)


def prefill_runs(chunks: Iterable[tuple[Sequence, int]]) -> Iterator[TokenRun]:
    for sequence, size in chunks:
        start = sequence.kv_length
        yield TokenRun(sequence, start, sequence.tokens[start : start + size])


def attention_batches(runs: Iterable[TokenRun]) -> list[list[TokenRun]]:
    """Return batches of runs that share an attention call: runs of one bucket, of similar size, either all from
    position 0 on or none."""

    def kind(run: TokenRun) -> tuple[int, bool]:
        return run.bucket.length, run.start > 0

    def span(run: TokenRun) -> tuple[int, int]:
        return len(run.tokens), run.start

    batches: list[list[TokenRun]] = []
    ordered = sorted(runs, key=lambda run: (*kind(run), *span(run)))
    for _, similar in groupby(ordered, key=kind):
        batch: list[TokenRun] = []
        total = 0
        for run in similar:
            size = len(run.tokens)
            # Sizes ascend within a kind, so this run would pad every earlier run of the batch to its own size.
            padding = (len(batch) + 1) * size - (total + size)
            if batch and padding > _PADDING_WORTH_A_CALL + total // 8:
                batches.append(batch)
                batch, total = [], 0
            batch.append(run)
            total += size
        batches.append(batch)
    # Ascending rows: adjacent ones are then read as a slice, without a copy.
    return [sorted(batch, key=lambda run: run.sequence.row) for batch in batches]
